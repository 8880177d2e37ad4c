use crate::AttentionError;

/// How attention is computed. Build it from [`Default`]:
///
/// ```
/// use burn_blocksparse::{AttentionOptions, WeightsMode};
///
/// let options = AttentionOptions::default().softcap(30.0).weights(WeightsMode::Store);
/// assert_eq!(options.softcap, Some(30.0));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor of the scores `q · kᵀ`; default `1 / √head_dim`.
    pub scale: Option<f64>,
    /// Softcap `c`: scores become `c · tanh(score / c)` after scaling and before masking (Gemma 2).
    pub softcap: Option<f64>,
    /// What is kept for the backward pass.
    pub weights: WeightsMode,
    /// How precise the products of f32 tensors are.
    pub precision: Precision,
}

/// How precise the products of f32 tensors are. Sums, exponentials and outputs are f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// f32.
    #[default]
    Full,
    /// Factors may be rounded to tf32, which has 10 bits of mantissa, where tensor cores take them: NVIDIA GPUs from Ampere on. Elsewhere, and
    /// where [`AttentionPlan`](crate::AttentionPlan) says so, as [`Full`](Self::Full).
    Tf32,
}

/// What the forward pass keeps for the backward pass. The gradients are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightsMode {
    /// Keep q, k, v, out and lse; compute the weights again in backward. Memory O(n · d).
    #[default]
    Recompute,
    /// Also keep the block-sparse attention weights, `[batch, blocks, block_size, block_size]`.
    Store,
}

impl AttentionOptions {
    /// Sets the factor of the scores.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Sets the softcap.
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Sets what is kept for the backward pass.
    pub fn weights(mut self, weights: WeightsMode) -> Self {
        self.weights = weights;
        self
    }

    /// Sets how precise the products of f32 tensors are.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// The factor of the scores for a head dimension.
    pub fn scale_for(&self, head_dim: usize) -> f64 {
        self.scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt())
    }

    pub(crate) fn validate(&self) -> Result<(), AttentionError> {
        if let Some(scale) = self.scale
            && !scale.is_finite()
        {
            return Err(AttentionError::argument("options.scale", "finite", scale));
        }
        if let Some(softcap) = self.softcap
            && !(softcap.is_finite() && softcap > 0.0)
        {
            return Err(AttentionError::argument(
                "options.softcap",
                "positive and finite",
                softcap,
            ));
        }
        Ok(())
    }
}
