//! Backend trait of block scores by kernels.

use std::ops::Range;

use crate::kernels::selection::{CompressedShape, FlexLimits, GateSizes, Kept};
use blocksparse::Always;
use burn_blocksparse::internal::prelude::*;

/// Request for scores of rows of blocks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BlockScores {
    /// Queries and keys of a block.
    pub block: usize,
    /// Range of rows of blocks.
    pub rows: Range<usize>,
    /// Factor of the dot products.
    pub factor: f64,
    /// True if queries see no later keys. Scores of hidden blocks are then unspecified.
    pub causal: bool,
    /// Kind of the scores.
    pub by: ScoredBy,
}

/// Kind of block scores.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ScoredBy {
    /// Sums of attention along antidiagonals of groups.
    Antidiagonals {
        /// Number of queries or keys of a group.
        stride: usize,
    },
    /// 1 for blocks that contain a selected key or distance, by the attention of the last queries; 0 for others.
    Lines {
        /// Number of last queries.
        queries: usize,
        /// Numbers of keys and distances to select.
        kept: Kept,
    },
    /// Like `Lines` for the last block of queries, or by products of means; each head decides by its last queries.
    Flex {
        /// Share of the attention to cover.
        gamma: f64,
        /// Threshold for using means, and the least selection.
        limits: FlexLimits,
    },
    /// Products of means.
    Means,
    /// Softmax of products of means over self-similar blocks. +∞ for key blocks that are not, and in rows of query blocks that are not.
    Alike {
        /// Threshold of the mean cosine of all pairs of a block's rows.
        similarity: f64,
        /// True if the mean over the sequence is subtracted from keys.
        smooth: bool,
    },
}

/// Request for attention sums of blocks via compressed blocks, or for a selection by them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CompressedCall {
    /// Sizes of the call.
    pub shape: CompressedShape,
    /// Factor of the dot products.
    pub scale: f64,
    /// Range of queries whose attention sums are wanted. A selection covers all queries.
    pub rows: Range<usize>,
    /// Forced blocks, which are not selected by score.
    pub forced: Always,
    /// Upper bound of the blocks that a query selects.
    pub most: usize,
}

#[cfg(feature = "fusion")]
impl CompressedCall {
    fn attention_sums_shape(&self) -> Shape {
        let shape = &self.shape;
        let [_, kv_heads] = shape.heads;
        [shape.batch, kv_heads, self.rows.len(), shape.chosen_from()].into()
    }

    fn choice_shape(&self) -> Shape {
        let ([_, kv_heads], [seq_q, _]) = (self.shape.heads, self.shape.seq);
        [self.shape.batch, kv_heads, seq_q, self.most].into()
    }
}

/// Returns the shape of the scores of a range of rows of blocks.
#[cfg(feature = "fusion")]
fn of_scores(q: &Shape, k: &Shape, rows: &Range<usize>, block: usize) -> Shape {
    [q[0], q[1], rows.len(), k[2].div_ceil(block)].into()
}

/// Block scores as backend operations. Only on devices that have kernels, on tensors without autodiff: queries `[batch, heads, seq_q, width]` and keys
/// `[batch, kv_heads, seq_kv, width]` give f32 `[batch, heads, rows, blocks]`. Elsewhere estimators use Burn's operations.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait EstimateOps: Backend {
    /// Computes the scores of rows of blocks.
    #[fusion(dtype = DType::F32, shape = of_scores(q, k, &call.rows, call.block))]
    fn block_scores(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        call: BlockScores,
    ) -> FloatTensor<Self>;

    /// Returns the blocks before each query's own whose means have the highest products with it: i32 `[batch, heads, seq_q, most]`, in descending order, ties
    /// in favor of the earlier block, −1 where there are fewer.
    #[fusion(dtype = DType::I32, shape = [q[0], q[1], q[2], call.most].into())]
    fn query_picks(q: FloatTensor<Self>, k: FloatTensor<Self>, call: GateSizes) -> IntTensor<Self>;

    /// Computes the attention of blocks via compressed blocks, summed over the heads of a KV head: `[batch, kv_heads, rows, blocks]`. `k`
    /// `[batch, kv_heads, entries, width]` holds the compressed keys, `lse` `[batch, heads, seq_q]` that of the attention to them. Requires a plan that has the
    /// kernel.
    #[fusion(dtype = DType::F32, shape = call.attention_sums_shape())]
    fn compressed_attention_sums(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        call: CompressedCall,
    ) -> FloatTensor<Self>;

    /// Returns the blocks with the highest attention sums in addition to the forced ones: i32 `[batch, kv_heads, seq_q, most]`, in descending order, ties in
    /// favor of the earlier block, −1 where there are fewer. Requires a plan that serves `most`.
    #[fusion(dtype = DType::I32, shape = call.choice_shape())]
    fn compressed_choice(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        call: CompressedCall,
    ) -> IntTensor<Self>;
}
