//! Sampling options and their reference on the host.

use burn_blocksparse::OpError;

/// Options of [`sample_tokens`](crate::sampling::sample_tokens). [`Default`] samples from the plain softmax.
///
/// Applied in this order: `repetition` lowers the logits of seen tokens, `temperature` divides all logits, and the softmax keeps the `top_k`
/// likeliest tokens, then the likeliest ones that make up `top_p`, then those at least `min_p` times as likely as the likeliest. Ties go to the
/// lower token id; a NaN logit counts as −∞.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct SampleOptions {
    /// Divisor of the logits; 0 takes the likeliest token. Default: 1.
    pub temperature: f64,
    /// Number of likeliest tokens that are kept. Default: all.
    pub top_k: Option<usize>,
    /// A token is kept if the probabilities of likelier ones sum to less than this (Holtzman et al., 2020). Default: 1.
    pub top_p: f64,
    /// A token is kept if its probability is at least this factor times the largest (Nguyen et al., 2024). Default: 0.
    pub min_p: f64,
    /// Penalty of seen tokens: positive logits are divided by it, others multiplied by it (Keskar et al., 2019). Default: 1.
    pub repetition: f64,
}

impl Default for SampleOptions {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition: 1.0,
        }
    }
}

impl SampleOptions {
    blocksparse::setters! {
        /// Sets the divisor of the logits.
        temperature: f64,
        /// Sets the number of likeliest tokens that are kept.
        top_k: Option<usize>,
        /// Sets the total probability of the candidates.
        top_p: f64,
        /// Sets the least probability of a candidate, relative to the likeliest.
        min_p: f64,
        /// Sets the penalty of seen tokens.
        repetition: f64,
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`OpError::Argument`] naming the first option out of range.
    pub fn check(&self) -> Result<(), OpError> {
        let &Self {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition,
        } = self;
        blocksparse::ensure! {
            OpError;
            temperature >= 0.0 && temperature.is_finite() => "temperature", "a number, at least 0", temperature;
            top_k != Some(0) => "top_k", "at least 1", 0;
            top_p > 0.0 && top_p <= 1.0 => "top_p", "above 0 and at most 1", top_p;
            (0.0..=1.0).contains(&min_p) => "min_p", "from 0 to 1", min_p;
            repetition > 0.0 && repetition.is_finite() => "repetition", "a number above 0", repetition;
        }
        Ok(())
    }

    /// Returns the candidates, likeliest first, with their probabilities in f64, which sum to 1. Empty if no logit is finite. `seen` tells whether a
    /// token was seen.
    pub fn candidates(&self, logits: &[f32], seen: impl Fn(u32) -> bool) -> Vec<(u32, f64)> {
        let mut kept: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&z| f64::from(z))).collect();
        kept.retain(|(_, logit)| !logit.is_nan() && *logit > f64::NEG_INFINITY);
        if self.repetition != 1.0 {
            for (token, logit) in &mut kept {
                if seen(*token) {
                    *logit = match *logit > 0.0 {
                        true => *logit / self.repetition,
                        false => *logit * self.repetition,
                    };
                }
            }
        }
        // A stable sort keeps ties in the order of token ids.
        kept.sort_by(|a, b| b.1.total_cmp(&a.1));
        let Some(&(_, likeliest)) = kept.first() else {
            return kept;
        };
        let top_k = match self.temperature == 0.0 || likeliest == f64::INFINITY {
            true => 1,
            false => self.top_k.unwrap_or(usize::MAX),
        };
        kept.truncate(top_k);
        for (_, weight) in &mut kept {
            *weight = match *weight == likeliest {
                true => 1.0,
                false => ((*weight - likeliest) / self.temperature).exp(),
            };
        }
        normalise(&mut kept);
        let mut before = 0.0;
        let within = kept.iter().take_while(|(_, probability)| {
            let is_kept = before < self.top_p;
            before += probability;
            is_kept
        });
        let count = within.count();
        kept.truncate(count.max(1));
        let least = self.min_p * kept[0].1;
        kept.retain(|(_, probability)| *probability >= least);
        normalise(&mut kept);
        kept
    }

    /// Samples a token with a number `draw` in `[0, 1)`: the first of [`Self::candidates`] whose cumulative probability exceeds it, in f64. None if
    /// no logit is finite.
    pub fn choose(&self, logits: &[f32], seen: impl Fn(u32) -> bool, draw: f64) -> Option<u32> {
        let candidates = self.candidates(logits, seen);
        let mut sum = 0.0;
        let found = candidates.iter().find(|(_, probability)| {
            sum += probability;
            sum > draw
        });
        // Rounding may leave the total no greater than `draw`.
        found.or(candidates.last()).map(|(token, _)| *token)
    }
}

fn normalise(weights: &mut [(u32, f64)]) {
    let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
    for (_, weight) in weights {
        *weight /= total;
    }
}
