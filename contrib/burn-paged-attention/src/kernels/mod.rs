//! Kernels of paged attention and of sampling.

#[doc(hidden)]
pub mod paged;
#[doc(hidden)]
pub mod sample;
