//! The backend trait of scores by which blocks are chosen, where kernels make them.

use std::ops::Range;

use blocksparse::kernels::selection::{Antidiagonals, FlexLimits, GateSizes, LineSizes, Touched};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

/// Which products of means are wanted.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MeanScores {
    /// Queries and keys of a block.
    pub block: usize,
    /// The rows of blocks that are wanted.
    pub rows: Range<usize>,
    /// What products are multiplied by.
    pub factor: f64,
    /// Whether queries see no later keys: other scores may be 0.
    pub causal: bool,
}

impl MeanScores {
    pub(crate) fn new(block: usize, rows: Range<usize>, factor: f64, causal: bool) -> Self {
        Self {
            block,
            rows,
            factor,
            causal,
        }
    }
}

/// Scores of blocks as backend operations, on devices that have kernels alone, of tensors that are not on an autodiff device: queries
/// `[batch, heads, seq_q, width]` and keys `[batch, kv_heads, seq_kv, width]` give `[batch, heads, rows, blocks]` in f32. Elsewhere estimators use Burn's
/// operations.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait EstimateOps: Backend {
    /// Sums of attention along antidiagonals.
    #[fusion(meta = meta::antidiagonals)]
    fn antidiagonal_masses(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        call: Antidiagonals,
    ) -> FloatTensor<Self>;

    /// 1 for blocks with a key or a distance that is kept by what the last queries give.
    #[fusion(meta = meta::lines)]
    fn blocks_of_lines(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        sizes: LineSizes,
        call: Touched,
    ) -> FloatTensor<Self>;

    /// The same, or by products of means, as each head's last queries say.
    #[fusion(meta = meta::flex)]
    fn flex_blocks(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        sizes: LineSizes,
        call: Touched,
        limits: FlexLimits,
    ) -> FloatTensor<Self>;

    /// Products of means.
    #[fusion(meta = meta::means)]
    fn mean_scores(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        call: MeanScores,
    ) -> FloatTensor<Self>;

    /// The blocks before each query's own whose means have the highest products with it, by falling product; of equal ones the earlier:
    /// `[batch, heads, seq_q, most]`, i32, −1 where there are fewer.
    #[fusion(meta = meta::picks)]
    fn query_picks(q: FloatTensor<Self>, k: FloatTensor<Self>, call: GateSizes) -> IntTensor<Self>;
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    use super::*;

    fn scores(q: &TensorSpec, k: &TensorSpec, rows: usize, block: usize) -> TensorSpec {
        let [batch, heads, ..] = q.shape.dims::<4>();
        let blocks = k.shape.dims::<4>()[2].div_ceil(block);
        TensorSpec::new([batch, heads, rows, blocks].into(), DType::F32)
    }

    pub fn antidiagonals(q: &TensorSpec, k: &TensorSpec, call: &Antidiagonals) -> TensorSpec {
        scores(q, k, call.rows.len(), call.block)
    }

    pub fn lines(q: &TensorSpec, k: &TensorSpec, _sizes: &LineSizes, call: &Touched) -> TensorSpec {
        scores(q, k, call.rows.len(), call.block)
    }

    pub fn flex(
        q: &TensorSpec,
        k: &TensorSpec,
        _sizes: &LineSizes,
        call: &Touched,
        _limits: &FlexLimits,
    ) -> TensorSpec {
        scores(q, k, call.rows.len(), call.block)
    }

    pub fn picks(q: &TensorSpec, _k: &TensorSpec, call: &GateSizes) -> TensorSpec {
        let [batch, heads, seq_q, _] = q.shape.dims::<4>();
        TensorSpec::new([batch, heads, seq_q, call.most].into(), DType::I32)
    }

    pub fn means(q: &TensorSpec, k: &TensorSpec, call: &MeanScores) -> TensorSpec {
        scores(q, k, call.rows.len(), call.block)
    }
}
