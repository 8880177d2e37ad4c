//! Row-wise kernels that selections use: top-k of rows, means of blocks, gated sums.

pub(crate) mod blocks;
pub(crate) mod gates;
pub(crate) mod top_k;
pub(crate) mod top_k_pages;
pub(crate) mod whole;

pub use blocks::{Beside, Blocked, RowBlocks, block_means};
pub use gates::{GatedBackward, gated_sum, gated_sum_backward, gated_text};
pub use top_k::topk_rows;
pub use top_k_pages::{TopKPagesShape, topk_pages};
