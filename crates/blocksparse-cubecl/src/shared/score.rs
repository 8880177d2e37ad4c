//! Numbers that scores are made with, and those of the online softmax.

use cubecl::prelude::*;

use crate::call::ScoreKind;

/// What products are multiplied by on their way to scores, of the tensor-core tiers.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ScoreScalars {
    /// Factor of dQ and dK.
    pub scale: f32,
    /// From scores to exponents of two.
    pub log2_scale: f32,
    /// Bound of the scores.
    pub softcap: f32,
    /// From products to the argument of the softcap's tanh, times 2 log2 e; without a softcap the factor of products that biases are added to.
    pub cap_scale: f32,
    /// The softmax threshold, in powers of two.
    pub threshold: ComptimeOption<f32>,
}

/// The same of the `simt` tier.
#[derive(CubeType, CubeLaunch)]
pub struct ScoreInputs {
    /// Factor of products.
    pub scale: InputScalar,
    /// Bound of the scores.
    pub softcap: InputScalar,
    /// The softmax threshold.
    pub threshold: ComptimeOption<InputScalar>,
}

/// What a kernel's line of a plan says of a threshold.
pub fn described_threshold(score: ScoreKind, skips: bool) -> &'static str {
    match (score.threshold, skips) {
        (false, _) => "",
        (true, true) => ", tiles below the softmax threshold skipped",
        (true, false) => ", no tile skipped",
    }
}

/// Scores of masked pairs. `exp(LOW − m)` is 0 for every `m ≥ LOWEST_MAX`, without infinities, which
/// WGSL does not promise.
pub const LOW: f32 = -1.0e30;

/// Where the running maximum starts: above [`LOW`], below any score. Not −∞, which masked scores of the
/// tensor-core tiers are.
pub const LOWEST_MAX: f32 = -1.0e29;

/// By how much, in powers of two, a new maximum must exceed the old one to replace it. Until then `p` exceeds 1,
/// harmlessly, and the output needs no rescaling.
pub const SLACK: f32 = 8.0;
