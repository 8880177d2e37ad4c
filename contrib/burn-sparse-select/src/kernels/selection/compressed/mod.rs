//! Attention of key blocks via compressed blocks, and per-query selection by it, on tensor cores.
//!
//! ```text
//! sum[J] = Σ over the group's heads h and compressed i of exp(scale · q_h · k_i − lse_h) · overlap(i, J)
//! ```
//!
//! ([NSA](https://arxiv.org/abs/2502.11089), equations 9 and 10.) A warp has all heads of some queries, so everything from products to the selection stays in
//! it. Scores are never stored, and attention sums only on request.
//!
//! ```text
//! tile      choice of the tile of a call, or the reason why it has none
//! kernel    launch, and a warp's iteration over compressed blocks
//! steps     products, and their sums over heads and overlaps
//! chosen    top-k of each query
//! asm       PTX of these
//! ```

mod asm;
pub(crate) mod chosen;
mod kernel;
mod steps;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

use cubecl::server::Handle;

pub use kernel::compressed_attention_sums;
pub use tile::{CompressedPlan, CompressedShape};

use blocksparse::Always;
use blocksparse_cubecl::TensorView;

/// Inputs of a launch.
#[derive(Clone, Debug)]
pub struct CompressedInputs {
    /// `[batch, heads, seq_q, width]`, in half precision.
    pub q: TensorView,
    /// Keys of compressed blocks: contiguous `[batch, kv_heads, entries, width]`, in the dtype of `q`.
    pub k: Handle,
    /// Lse of each query over the compressed blocks, −∞ if it sees none: contiguous f32 `[batch, heads, seq_q]`.
    pub lse: Handle,
}

/// Output of a launch.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// Attention sums of a range of queries: f32 `[batch · kv_heads, rows, blocks]`; 0 after the blocks that a query sees.
    AttentionSums(Range<usize>),
    /// Blocks with the highest sums in addition to the forced ones: i32 `[batch · kv_heads, seq_q, most]`, in descending order, ties in favor of the earlier,
    /// −1 where there are fewer.
    Choice {
        /// Forced blocks, which are not selected by score. `local` is at least 1, the query's own block.
        forced: Always,
        /// Upper bound of the blocks that a query selects.
        most: usize,
    },
}
