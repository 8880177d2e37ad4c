//! The attention that blocks of keys get by way of compressed blocks, and the blocks that single queries choose by it, on tensor cores.
//!
//! ```text
//! sum[J] = Σ over the group's heads h and compressed i of exp(scale · q_h · k_i − lse_h) · overlap(i, J)
//! ```
//!
//! ([NSA](https://arxiv.org/abs/2502.11089), equations 9 and 10.) A warp has all heads of some queries, so that everything from products to the choice stays in it:
//! scores are never in memory, and attention sums only if they are asked for.
//!
//! ```text
//! tile      what a call gets, or why not
//! kernel    a launch, and how a warp goes through compressed blocks
//! steps     products, their sums over heads and over what overlaps
//! chosen    the highest few
//! asm       PTX of them
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

/// What a launch reads.
#[derive(Clone, Debug)]
pub struct CompressedInputs {
    /// `[batch, heads, seq_q, width]`, in half precision.
    pub q: TensorView,
    /// Keys of compressed blocks: `[batch, kv_heads, entries, width]`, contiguous, in the same type.
    pub k: Handle,
    /// Natural logarithms of the sums of exponentials of each query's scores, −∞ where it sees nothing: `[batch, heads, seq_q]`, f32, contiguous.
    pub lse: Handle,
}

/// What is made of attention sums.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// Themselves, of some queries: `[batch · kv_heads, rows, blocks]`, f32; 0 behind what a query sees.
    AttentionSums(Range<usize>),
    /// The blocks of the highest ones beside those that are forced, by falling attention sum, of equal ones the earlier: `[batch · kv_heads, seq_q, most]`, i32, −1 where
    /// there are fewer.
    Choice {
        /// Blocks that are not chosen. Of those around a query's own there is at least its own.
        forced: Always,
        /// How many are chosen, at most.
        most: usize,
    },
}
