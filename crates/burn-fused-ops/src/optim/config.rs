//! Configuration of AdamW.

use crate::optim::FusedAdamW;
use burn_blocksparse::OpError;

/// Hyperparameters of [`FusedAdamW`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct FusedAdamWConfig {
    /// β₁, the decay of the first moment; in `[0, 1)`, default 0.9.
    pub beta_1: f64,
    /// β₂, the decay of the second moment; in `[0, 1)`, default 0.999.
    pub beta_2: f64,
    /// ε, added to the root of the second moment; default 1e-5, as in Burn's `AdamWConfig`. The paper uses 1e-8.
    pub epsilon: f64,
    /// λ: a step multiplies parameters by `1 − η λ`; default 1e-4, as in Burn's `AdamWConfig`.
    pub weight_decay: f64,
    /// Upper bound of the norm over all gradients; default none.
    pub max_grad_norm: Option<f64>,
}

impl Default for FusedAdamWConfig {
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-5,
            weight_decay: 1e-4,
            max_grad_norm: None,
        }
    }
}

impl FusedAdamWConfig {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    blocksparse::setters! {
        /// Sets β₁.
        with_beta_1 => beta_1: f64,
        /// Sets β₂.
        with_beta_2 => beta_2: f64,
        /// Sets ε.
        with_epsilon => epsilon: f64,
        /// Sets λ.
        with_weight_decay => weight_decay: f64,
        /// Sets the upper bound of the norm over all gradients.
        with_max_grad_norm => max_grad_norm: Option<f64>,
    }

    /// Returns an optimizer that has taken no step. The configuration is checked in its first step.
    pub fn init(&self) -> FusedAdamW {
        FusedAdamW::new(*self)
    }

    pub(crate) fn validate(&self) -> Result<(), OpError> {
        for (name, beta) in [("beta_1", self.beta_1), ("beta_2", self.beta_2)] {
            blocksparse::ensure! { OpError; (0.0..1.0).contains(&beta) => name, "in [0, 1)", beta; }
        }
        for (name, number) in [
            ("epsilon", self.epsilon),
            ("weight_decay", self.weight_decay),
        ] {
            blocksparse::ensure! { OpError; number.is_finite() && number >= 0.0 => name, "a finite number, at least 0", number; }
        }
        match self.max_grad_norm {
            Some(norm) => check_norm("max_grad_norm", norm),
            None => Ok(()),
        }
    }
}

/// Checks that a norm's limit is finite and above 0.
pub(crate) fn check_norm(name: &'static str, norm: f64) -> Result<(), OpError> {
    blocksparse::ensure! { OpError; norm.is_finite() && norm > 0.0 => name, "a finite number above 0", norm; }
    Ok(())
}
