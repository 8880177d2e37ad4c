//! Scalars of scores and constants of the online softmax.

use cubecl::prelude::*;

use crate::call::ScoreKind;

/// Scalars of scores on the tensor-core tiers.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ScoreScalars {
    /// Factor of dQ and dK.
    pub scale: f32,
    /// Factor from scores to base-2 exponents.
    pub log2_scale: f32,
    /// Softcap of the scores.
    pub softcap: f32,
    /// Factor from products to the argument of the softcap's tanh, times 2 log2 e. Without a softcap, the factor of products before biases are added.
    pub cap_scale: f32,
    /// Softmax threshold in base 2.
    pub threshold: ComptimeOption<f32>,
}

/// Scalars of scores on the `simt` tier.
#[derive(CubeType, CubeLaunch)]
pub struct ScoreInputs {
    /// Factor of products.
    pub scale: InputScalar,
    /// Softcap of the scores.
    pub softcap: InputScalar,
    /// Softmax threshold.
    pub threshold: ComptimeOption<InputScalar>,
}

/// Returns the note on a threshold in a printed plan line.
pub fn described_threshold(score: ScoreKind, skips: bool) -> &'static str {
    match (score.threshold, skips) {
        (false, _) => "",
        (true, true) => ", tiles below the softmax threshold skipped",
        (true, false) => ", no tile skipped",
    }
}

/// Score of masked pairs. `exp(LOW − m)` is 0 for every `m ≥ LOWEST_MAX`, without infinities, which WGSL does not guarantee.
pub const LOW: f32 = -1.0e30;

/// Initial running maximum: above [`LOW`], below any score. Not −∞, because masked scores of the tensor-core tiers are −∞.
pub const LOWEST_MAX: f32 = -1.0e29;

/// Base-2 difference by which a new maximum must exceed the old one to replace it. Until then `p` may exceed 1, which is harmless, and the output needs no
/// rescaling.
pub const SLACK: f32 = 8.0;
