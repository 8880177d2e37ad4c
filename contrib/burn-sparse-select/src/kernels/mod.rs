//! Kernels of choices by content, and of attention over them.

#[doc(hidden)]
pub mod indexer;
#[doc(hidden)]
pub mod listed;
#[doc(hidden)]
pub mod rows;
#[doc(hidden)]
pub mod selection;
