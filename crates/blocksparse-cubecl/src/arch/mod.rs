//! What kernels say to a device in its own language: PTX, and planes of 32 units.

#[cfg(feature = "cuda-asm")]
#[doc(hidden)]
pub mod ptx;
#[cfg(feature = "cuda-asm")]
#[doc(hidden)]
pub mod sm80;
#[cfg(feature = "cuda-asm")]
#[doc(hidden)]
pub mod sm90;
#[cfg(feature = "cuda-asm")]
#[doc(hidden)]
pub mod swizzled;
#[cfg(feature = "cuda-asm")]
#[doc(hidden)]
pub mod tma;

#[doc(hidden)]
pub mod planes;

use cubecl::prelude::*;

/// Four numbers: the width of shared memory accesses.
pub type Four = Const<4>;
