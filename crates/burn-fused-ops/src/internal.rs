//! Helpers of the layers and of tests. Nothing here is stable.

pub use crate::linear::heads::apart::{cat_head_groups, split_head_groups};
