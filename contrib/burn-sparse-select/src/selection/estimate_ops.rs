//! The backend trait of scores by which blocks are chosen, where kernels make them.

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
    /// The rows of blocks that are wanted.
    pub rows: Range<usize>,
    /// Factor of the dot products.
    pub factor: f64,
    /// True if queries see no later keys: other scores may be any.
    pub causal: bool,
    /// What scores are made of.
    pub by: ScoredBy,
}

/// What scores of blocks are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ScoredBy {
    /// Sums of attention along antidiagonals of groups of so many queries and keys.
    Antidiagonals {
        /// Members of a group.
        stride: usize,
    },
    /// 1 for blocks with a key or a distance that is kept by what the last queries give.
    Lines {
        /// Number of last queries.
        queries: usize,
        /// Keys and distances that are kept.
        kept: Kept,
    },
    /// The same of the last block of queries, or by products of means, as each head's last queries say.
    Flex {
        /// Share that is kept.
        gamma: f64,
        /// When means are trusted, and what is kept at least.
        limits: FlexLimits,
    },
    /// Products of means.
    Means,
    /// Their softmax over blocks that are alike in themselves; +∞ of others, and in rows of queries that are not.
    Alike {
        /// The least mean of the cosines of all pairs of a block's rows.
        similarity: f64,
        /// True if keys are taken less their mean over the sequence.
        smooth: bool,
    },
}

/// Request for importance scores of compressed blocks, or for blocks chosen by them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CompressedCall {
    /// Sizes of the call.
    pub shape: CompressedShape,
    /// Factor of the dot products.
    pub scale: f64,
    /// Queries whose importance scores are wanted; all of them choose.
    pub rows: Range<usize>,
    /// Blocks that are not chosen.
    pub forced: Always,
    /// Blocks that a query chooses, at most.
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

/// The shape of scores of some rows of blocks.
#[cfg(feature = "fusion")]
fn of_scores(q: &Shape, k: &Shape, rows: &Range<usize>, block: usize) -> Shape {
    [q[0], q[1], rows.len(), k[2].div_ceil(block)].into()
}

/// Scores of blocks as backend operations, on devices that have kernels alone, of tensors that are not on an autodiff device: queries
/// `[batch, heads, seq_q, width]` and keys `[batch, kv_heads, seq_kv, width]` give `[batch, heads, rows, blocks]` in f32. Elsewhere estimators use Burn's
/// operations.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait EstimateOps: Backend {
    /// The scores of rows of blocks.
    #[fusion(dtype = DType::F32, shape = of_scores(q, k, &call.rows, call.block))]
    fn block_scores(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        call: BlockScores,
    ) -> FloatTensor<Self>;

    /// The blocks before each query's own whose means have the highest products with it, by falling product; ties go to the earlier:
    /// `[batch, heads, seq_q, most]`, i32, −1 where there are fewer.
    #[fusion(dtype = DType::I32, shape = [q[0], q[1], q[2], call.most].into())]
    fn query_picks(q: FloatTensor<Self>, k: FloatTensor<Self>, call: GateSizes) -> IntTensor<Self>;

    /// The attention that blocks get by way of compressed blocks, whose keys are `k` `[batch, kv_heads, entries, width]`, summed over the heads that share keys:
    /// `[batch, kv_heads, rows, blocks]`. `lse` `[batch, heads, seq_q]` is that of the attention to compressed blocks. Only with a plan that has the kernel.
    #[fusion(dtype = DType::F32, shape = call.attention_sums_shape())]
    fn compressed_attention_sums(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        call: CompressedCall,
    ) -> FloatTensor<Self>;

    /// The blocks of the highest ones in addition to the forced ones, by falling attention sum; ties go to the earlier: `[batch, kv_heads, seq_q, most]`, i32, −1 where there
    /// are fewer. Only with a plan that chooses so many.
    #[fusion(dtype = DType::I32, shape = call.choice_shape())]
    fn compressed_choice(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        lse: FloatTensor<Self>,
        call: CompressedCall,
    ) -> IntTensor<Self>;
}
