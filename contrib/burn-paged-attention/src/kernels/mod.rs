//! Kernels of attention over pages, and of sampling.

#[doc(hidden)]
pub mod paged;
#[doc(hidden)]
pub mod sample;
