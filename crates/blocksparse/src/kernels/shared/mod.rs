//! What kernels of several tiers share.

#[cfg(feature = "cuda-asm")]
pub mod asm;
pub mod bins;
pub mod codec;
pub mod curve;
#[cfg(feature = "cuda-asm")]
pub mod distances;
pub mod dropout;
pub mod score;
#[cfg(feature = "cuda-asm")]
pub mod softcap;
#[cfg(feature = "cuda-asm")]
pub mod tma;
pub mod unit_sums;
pub mod walk;
