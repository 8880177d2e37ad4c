//! Helpers of the layers and tests. Nothing here is stable.

pub use crate::selection::layouts::LayoutCache;
pub use crate::selection::token_order::{TopKRows, row_products, sort_by_bucket, topk_rows};
