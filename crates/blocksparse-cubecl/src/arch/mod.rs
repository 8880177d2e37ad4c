//! What kernels say to a device in its own language: PTX, and planes of 32 units.

#[cfg(feature = "cuda-asm")]
pub(crate) mod ptx;
#[cfg(feature = "cuda-asm")]
pub(crate) mod sm80;
#[cfg(feature = "cuda-asm")]
pub(crate) mod sm90;
#[cfg(feature = "cuda-asm")]
pub(crate) mod swizzled;
#[cfg(feature = "cuda-asm")]
pub(crate) mod tma;

pub(crate) mod planes;

use cubecl::prelude::*;

/// Four numbers: the width of shared memory accesses.
pub type Four = Const<4>;
