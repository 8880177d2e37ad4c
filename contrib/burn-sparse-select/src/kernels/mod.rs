//! Kernels of content-based selection, and of attention over selections.

#[doc(hidden)]
pub mod indexer;
#[doc(hidden)]
pub mod listed;
#[doc(hidden)]
pub mod rows;
#[doc(hidden)]
pub mod selection;
