//! The backend trait of an indexer's scores and what it learns by, where kernels make them.

use burn::backend::ExtensionType;

use blocksparse::HadamardFp8;
use burn_blocksparse::internal::prelude::*;

/// Request for scores of an indexer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct IndexerScores {
    /// The first query, and how many.
    pub rows: [usize; 2],
    /// Keys up to a query's own that get the highest score.
    pub near: usize,
    /// True if the scores of keys after a query's position are wanted: others say nothing.
    pub all: bool,
    /// True if queries and keys are rows that were [rounded](IndexerOps::indexer_rows) to fp8: they may be multiplied in fp8.
    pub in_fp8: bool,
}

/// Request for an indexer's choice of keys.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct IndexerChoice {
    /// Keys of a query's list.
    pub most: usize,
    /// Keys up to the last that a query sees that have the highest score.
    pub near: usize,
    /// Scores in memory at a time, at most, unless a query has more.
    pub chunk_elements: usize,
    /// As in [`IndexerScores`].
    pub in_fp8: bool,
    /// Keys of a block, if queries list blocks of keys. On devices alone that have a kernel for it.
    pub block: Option<usize>,
}

/// Request for the highest dot products of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockMaxima {
    /// The first query, and how many.
    pub rows: [usize; 2],
    /// Keys of a block: 8, 16, 32, 64 or 128.
    pub block: usize,
    /// So many of the first blocks, all of them whole.
    pub blocks: usize,
}

/// Parameters of an indexer's loss, besides its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct IndexerLoss {
    /// The attention's scale.
    pub scale: f64,
    /// Queries that are computed at once: their scores are in memory at a time.
    pub rows: usize,
    /// True if no query is compared over a key after its own position.
    pub causal: bool,
}

op_values! {
    /// An index: q and k of one type.
    pub struct IndexInputs {
        /// `[batch, index_heads, seq_q, index_dim]`
        pub q: FloatTensor,
        /// `[batch, 1, seq_kv, index_dim]`
        pub k: FloatTensor,
        /// `[batch, index_heads, seq_q]`
        pub weights: FloatTensor,
    }

    /// Dense attention that an indexer learns from: q and k of one type.
    pub struct TargetInputs {
        /// `[batch, heads, seq_q, head_dim]`
        pub q: FloatTensor,
        /// `[batch, kv_heads, seq_kv, head_dim]`
        pub k: FloatTensor,
        /// `[batch, heads, seq_q]`
        pub lse: FloatTensor,
        /// The keys over which it is compared.
        pub over: ComparedKeys,
    }
}

/// The keys over which an indexer is compared.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub enum ComparedKeys<B: Backend> {
    /// All that a query sees.
    All,
    /// i32 `[batch, 1, seq_q, most]`, ascending, each once, −1 after the last.
    Indices(IntTensor<B>),
}

op_values! {
    /// The keys that queries choose from.
    pub struct AmongKeys {
        /// i32 `[batch, seq_q, listed]`: the keys that each query lists, in any order, of one batch entry alone, or the blocks, ascending. Below 0 after the last. All
        /// keys, if there are no lists.
        pub lists: OptInt,
        /// i32 `[batch or 1, seq_q]`: of these keys queries see so many, from the first on. Those up to their own positions, if it is not said.
        pub seen: OptInt,
    }

    /// The losses of queries, and the gradients of their mean, all f32.
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

/// An indexer's scores and losses as backend operations, on devices that have kernels alone, of tensors that are not on an autodiff device. Elsewhere they are
/// Burn's operations.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait IndexerOps: Backend {
    /// Scores, f32 `[batch, rows, seq_kv]`.
    #[fusion(
        dtype = DType::F32,
        shape = [index.k.shape[0], call.rows[1], index.k.shape[2]].into()
    )]
    fn indexer_scores(
        #[extension_type] index: IndexInputs<Self>,
        call: IndexerScores,
    ) -> FloatTensor<Self>;

    /// The keys of the highest scores of all queries, i32 `[batch, seq_q, most]`, ascending, −1 after the last: ties go to the earlier, NaN sorts last. Of keys
    /// that queries list their places in the list.
    #[fusion(
        dtype = DType::I32,
        shape = [index.q.shape[0], index.q.shape[2], call.most].into()
    )]
    fn indexer_choice(
        #[extension_type] index: IndexInputs<Self>,
        #[extension_type] among: AmongKeys<Self>,
        call: IndexerChoice,
    ) -> IntTensor<Self>;

    /// The highest of the products of a query with the keys of each block, f32 `[batch, heads, rows, blocks]`: of `q` `[batch, heads, seq_q, width]` and `k`
    /// `[batch, 1, seq_kv, width]` of one type. NaN counts only where all are. On devices alone that have a kernel for it.
    #[fusion(dtype = DType::F32, shape = [q[0], q[1], call.rows[1], call.blocks].into())]
    fn indexer_maxima(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        call: BlockMaxima,
    ) -> FloatTensor<Self>;

    /// Rows of an index, rotated and rounded to fp8 as [`HadamardFp8::round`] says, in their own dtype: f32, f16 or bf16.
    #[fusion(dtype = x, shape = x)]
    fn indexer_rows(x: FloatTensor<Self>, of: HadamardFp8) -> FloatTensor<Self>;

    /// The losses of all queries, with the gradients of their mean.
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
