//! What kernels of several tiers share.

#[cfg(feature = "cuda-asm")]
pub mod asm;
#[cfg(feature = "cuda-asm")]
pub mod distances;
pub mod dropout;
pub mod score;
#[cfg(feature = "cuda-asm")]
pub mod tma;
pub mod walk;
