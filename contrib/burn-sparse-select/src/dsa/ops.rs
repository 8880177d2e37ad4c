//! Backend trait of an indexer's scores, selections and losses by kernels.

use burn::backend::ExtensionType;

use blocksparse::HadamardFp8;
use burn_blocksparse::internal::prelude::*;

/// Request for scores of an indexer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct IndexerScores {
    /// First query and number of queries.
    pub rows: [usize; 2],
    /// Number of keys up to a query's own that get the highest score.
    pub near: usize,
    /// True to also score keys after a query's position. Otherwise their scores are unspecified.
    pub all: bool,
    /// True if queries and keys are rows that were [rounded](IndexerOps::indexer_rows) to fp8, so they may be multiplied in fp8.
    pub in_fp8: bool,
}

/// Request for an indexer's selection of keys.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct IndexerChoice {
    /// Number of keys of a query's list.
    pub most: usize,
    /// Number of last visible keys that get the highest score.
    pub near: usize,
    /// Upper bound of the scores in memory at a time. A single query may exceed it.
    pub chunk_elements: usize,
    /// See [`IndexerScores`].
    pub in_fp8: bool,
    /// Number of keys of a block, if queries list blocks of keys. Only on devices that have a kernel for it.
    pub block: Option<usize>,
}

/// Request for the highest dot product per block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockMaxima {
    /// First query and number of queries.
    pub rows: [usize; 2],
    /// Number of keys of a block: 8, 16, 32, 64 or 128.
    pub block: usize,
    /// Number of blocks, from the first on; all of them are complete.
    pub blocks: usize,
}

/// Parameters of an indexer's loss.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct IndexerLoss {
    /// Scale of the attention.
    pub scale: f64,
    /// Number of queries whose scores are computed and stored at a time.
    pub rows: usize,
    /// True if no query is compared over keys after its own position.
    pub causal: bool,
}

op_values! {
    /// An index; q and k have the same dtype.
    pub struct IndexInputs {
        /// `[batch, index_heads, seq_q, index_dim]`
        pub q: FloatTensor,
        /// `[batch, 1, seq_kv, index_dim]`
        pub k: FloatTensor,
        /// `[batch, index_heads, seq_q]`
        pub weights: FloatTensor,
    }

    /// Attention that an indexer is trained to match; q and k have the same dtype.
    pub struct TargetInputs {
        /// `[batch, heads, seq_q, head_dim]`
        pub q: FloatTensor,
        /// `[batch, kv_heads, seq_kv, head_dim]`
        pub k: FloatTensor,
        /// `[batch, heads, seq_q]`
        pub lse: FloatTensor,
        /// Keys over which the loss compares.
        pub over: ComparedKeys,
    }
}

/// Keys over which an indexer's loss compares.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub enum ComparedKeys<B: Backend> {
    /// All keys that a query sees.
    All,
    /// i32 `[batch, 1, seq_q, most]`, ascending and unique, then −1.
    Indices(IntTensor<B>),
}

op_values! {
    /// Keys that queries select from.
    pub struct AmongKeys {
        /// i32 `[batch, seq_q, listed]`: keys that each query lists, in any order, for a single batch entry, or blocks, ascending. Negative after the last.
        /// Without lists all keys are candidates.
        pub lists: OptInt,
        /// i32 `[batch or 1, seq_q]`: number of candidates that each query sees, from the first on. By default those up to its own position.
        pub seen: OptInt,
    }

    /// Losses of queries and the gradients of their mean, all f32.
    pub struct IndexerGrads {
        /// `[batch, seq_q]`
        pub losses: FloatTensor,
        /// `[batch, index_heads, seq_q, index_dim]`
        pub q: FloatTensor,
        /// `[batch, 1, seq_kv, index_dim]`
        pub k: FloatTensor,
        /// `[batch, index_heads, seq_q]`
        pub weights: FloatTensor,
    }
}

/// An indexer's scores, selections and losses as backend operations. Only on devices that have kernels, on tensors without autodiff. Elsewhere Burn's
/// operations compute them.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait IndexerOps: Backend {
    /// Computes scores: f32 `[batch, rows, seq_kv]`.
    #[fusion(
        dtype = DType::F32,
        shape = [index.k.shape[0], call.rows[1], index.k.shape[2]].into()
    )]
    fn indexer_scores(
        #[extension_type] index: IndexInputs<Self>,
        call: IndexerScores,
    ) -> FloatTensor<Self>;

    /// Returns the highest-scoring keys of all queries: i32 `[batch, seq_q, most]`, ascending, then −1. Ties go to the earlier key; NaN sorts last. For listed
    /// keys the result holds list indices.
    #[fusion(
        dtype = DType::I32,
        shape = [index.q.shape[0], index.q.shape[2], call.most].into()
    )]
    fn indexer_choice(
        #[extension_type] index: IndexInputs<Self>,
        #[extension_type] among: AmongKeys<Self>,
        call: IndexerChoice,
    ) -> IntTensor<Self>;

    /// Computes the highest product of a query with the keys of each block: f32 `[batch, heads, rows, blocks]`, for `q` `[batch, heads, seq_q, width]` and `k`
    /// `[batch, 1, seq_kv, width]` of one dtype. The result is NaN only if all products are. Only on devices that have a kernel for it.
    #[fusion(dtype = DType::F32, shape = [q[0], q[1], call.rows[1], call.blocks].into())]
    fn indexer_maxima(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        call: BlockMaxima,
    ) -> FloatTensor<Self>;

    /// Rotates rows of an index and rounds them to fp8, see [`HadamardFp8::round`]. They keep their dtype: f32, f16 or bf16.
    #[fusion(dtype = x, shape = x)]
    fn indexer_rows(x: FloatTensor<Self>, of: HadamardFp8) -> FloatTensor<Self>;

    /// Computes the losses of all queries and the gradients of their mean.
    #[fusion(meta = meta::loss)]
    fn indexer_loss(
        #[extension_type] index: IndexInputs<Self>,
        #[extension_type] target: TargetInputs<Self>,
        call: IndexerLoss,
    ) -> IndexerGrads<Self>;
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;

    pub fn loss(
        index: &IndexInputsMetadata,
        _target: &TargetInputsMetadata,
        _call: &IndexerLoss,
    ) -> IndexerGradsMetadata {
        let [batch, _, seq_q, _] = index.q.shape.dims::<4>();
        let like = |spec: &TensorSpec| TensorSpec::new(spec.shape.clone(), DType::F32);
        IndexerGradsMetadata {
            losses: TensorSpec::new([batch, seq_q].into(), DType::F32),
            q: like(&index.q),
            k: like(&index.k),
            weights: like(&index.weights),
        }
    }
}
