//! Helpers of sister crates. Nothing here is stable.

#[cfg(feature = "cube")]
pub use crate::kernels::paged as kernels;
pub use crate::paged::{backend, check_heads, check_shared, ops, reference, values};
