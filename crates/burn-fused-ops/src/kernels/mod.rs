//! Kernels of training ops.

#[doc(hidden)]
pub mod few_rows;
#[doc(hidden)]
pub mod linear;
#[doc(hidden)]
pub mod optim;
mod prelude;
#[doc(hidden)]
pub mod rows;
