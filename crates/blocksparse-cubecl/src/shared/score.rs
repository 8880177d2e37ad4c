//! Numbers of the online softmax.

/// Scores of masked pairs. `exp(LOW − m)` is 0 for every `m ≥ LOWEST_MAX`, without infinities, which
/// WGSL does not promise.
pub const LOW: f32 = -1.0e30;

/// Where the running maximum starts: above [`LOW`], below any score. Not −∞, which masked scores of the
/// tensor-core tiers are.
pub const LOWEST_MAX: f32 = -1.0e29;

/// By how much, in powers of two, a new maximum must exceed the old one to replace it. Until then `p` exceeds 1,
/// harmlessly, and the output needs no rescaling.
#[cfg(feature = "cuda-asm")]
pub const SLACK: f32 = 8.0;
