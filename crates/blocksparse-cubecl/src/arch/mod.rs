//! What kernels say to a device in its own language: PTX, and planes of 32 units.

#[doc(hidden)]
pub mod ptx;
#[doc(hidden)]
pub mod sm80;
#[doc(hidden)]
pub mod sm90;
#[doc(hidden)]
pub mod swizzled;
#[doc(hidden)]
pub mod tma;

#[doc(hidden)]
pub mod planes;

use cubecl::prelude::*;

/// Four numbers: the width of shared memory accesses.
pub type Four = Const<4>;
