//! Kernels of training ops.

#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod linear;
#[doc(hidden)]
pub mod optim;
#[doc(hidden)]
pub mod rows;
