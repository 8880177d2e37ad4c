//! Helpers of tests and benches. Nothing here is stable.

#[cfg(feature = "cube")]
pub use crate::kernels::paged as kernels;
