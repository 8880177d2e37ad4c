//! Scores of blocks by kernels, on devices that have them. `None` says that Burn's operations have to make them: the device has no kernels, or there are more
//! numbers than they count.

use std::ops::Range;

use crate::kernels::selection::{Antidiagonals, FlexLimits, GateSizes, Kept, LineSizes, Touched};
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{DType, Int, Tensor};

use crate::selection::estimate_backend::available;
use crate::selection::estimate_ops::{EstimateOps, LikeBlocks, MeanScores};
use crate::selection::estimator::EstimateInputs;
use burn_blocksparse::internal::device::cube;

/// Returns whether kernels make scores for a call, none of whose buffers has more numbers than these.
fn is_served(call: &EstimateInputs, numbers: &[usize]) -> bool {
    let is_float = |dtype| matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    // A product of lengths that do not fit 64 bits is no call's.
    let few = numbers
        .iter()
        .all(|&numbers| i32::try_from(numbers).is_ok());
    let device = cube::of(&call.q.device());
    few && is_float(call.q.dtype())
        && call.q.dims()[2] > 0
        && call.k.dims()[2] > 0
        && device.is_some_and(|device| available(&device))
}

/// Batch entries times heads, of queries and of keys.
fn lists(call: &EstimateInputs) -> [usize; 2] {
    [&call.q, &call.k].map(|x| {
        let [batch, heads, ..] = x.dims();
        batch * heads
    })
}

fn seq(call: &EstimateInputs) -> [usize; 2] {
    [&call.q, &call.k].map(|x| x.dims()[2])
}

/// Queries and keys.
fn primitives(call: &EstimateInputs) -> [DispatchTensor; 2] {
    [&call.q, &call.k].map(|x| x.clone().into_dispatch())
}

/// Scores of all rows of all heads.
fn scores(call: &EstimateInputs, block: usize) -> usize {
    let [seq_q, seq_kv] = seq(call);
    lists(call)[0] * seq_q.div_ceil(block) * seq_kv.div_ceil(block)
}

/// Those of [`Antidiagonals`](crate::selection::XAttention) of a block and a stride.
pub(crate) fn antidiagonals(
    call: &EstimateInputs,
    [block, stride]: [usize; 2],
    rows: &Range<usize>,
) -> Option<Tensor<4>> {
    let [_, seq_kv] = seq(call);
    // A row of blocks is the least that is computed at a time.
    let row = lists(call)[0] * (block / stride) * seq_kv.div_ceil(stride).next_multiple_of(8);
    is_served(call, &[scores(call, block), row]).then(|| {
        let wanted = Antidiagonals {
            lists: lists(call),
            seq: seq(call),
            width: call.q.dims()[3],
            block,
            stride,
            causal: call.causal,
            factor: call.scale / stride as f64,
            rows: rows.clone(),
        };
        let [q, k] = primitives(call);
        Tensor::from_dispatch(<Dispatch as EstimateOps>::antidiagonal_attention_sums(
            q, k, wanted,
        ))
    })
}

/// The last queries of a call, of which so many choose, if kernels take them.
fn last_queries(call: &EstimateInputs, queries: usize, block: usize) -> Option<LineSizes> {
    let [seq_q, seq_kv] = seq(call);
    let queries = queries.min(seq_q);
    let lists = lists(call);
    let products = queries.checked_mul(seq_kv.next_multiple_of(8))?;
    let numbers = [
        scores(call, block),
        products,
        2 * lists[0] * (seq_kv + 2 * block),
    ];
    is_served(call, &numbers).then(|| LineSizes {
        lists,
        seq: [queries, seq_kv],
        width: call.q.dims()[3],
        factor: call.scale,
    })
}

fn touched(call: &EstimateInputs, block: usize, rows: &Range<usize>, kept: Kept) -> Touched {
    Touched {
        lists: lists(call)[0],
        seq: seq(call),
        block,
        rows: rows.clone(),
        kept,
    }
}

/// Those of [`VerticalSlash`](crate::selection::VerticalSlash): of the last `queries` queries, what is kept of columns and of slashes.
pub(crate) fn lines(
    call: &EstimateInputs,
    [block, queries]: [usize; 2],
    kept: Kept,
    rows: &Range<usize>,
) -> Option<Tensor<4>> {
    let sizes = last_queries(call, queries, block)?;
    let wanted = touched(call, block, rows, kept);
    let [q, k] = primitives(call);
    let scores = <Dispatch as EstimateOps>::blocks_of_lines(q, k, sizes, wanted);
    Some(Tensor::from_dispatch(scores))
}

/// Those of [`FlexPrefill`](crate::selection::FlexPrefill).
pub(crate) fn flex(
    call: &EstimateInputs,
    block: usize,
    gamma: f64,
    limits: FlexLimits,
    rows: &Range<usize>,
) -> Option<Tensor<4>> {
    let sizes = last_queries(call, block, block)?;
    let wanted = touched(call, block, rows, Kept::Share(gamma));
    let [q, k] = primitives(call);
    let scores = <Dispatch as EstimateOps>::flex_blocks(q, k, sizes, wanted, limits);
    Some(Tensor::from_dispatch(scores))
}

fn mean_scores(call: &EstimateInputs, block: usize, rows: &Range<usize>) -> MeanScores {
    MeanScores {
        block,
        rows: rows.clone(),
        factor: call.scale,
        causal: call.causal,
    }
}

/// Those of [`MeanPool`](crate::selection::MeanPool).
pub(crate) fn means(call: &EstimateInputs, block: usize, rows: &Range<usize>) -> Option<Tensor<4>> {
    is_served(call, &[scores(call, block)]).then(|| {
        let wanted = mean_scores(call, block, rows);
        let [q, k] = primitives(call);
        Tensor::from_dispatch(<Dispatch as EstimateOps>::mean_scores(q, k, wanted))
    })
}

/// Those of [`SpargeAttn`](crate::selection::SpargeAttn).
pub(crate) fn alike(
    call: &EstimateInputs,
    block: usize,
    like: LikeBlocks,
    rows: &Range<usize>,
) -> Option<Tensor<4>> {
    is_served(call, &[scores(call, block)]).then(|| {
        let wanted = mean_scores(call, block, rows);
        let [q, k] = primitives(call);
        Tensor::from_dispatch(<Dispatch as EstimateOps>::alike_scores(q, k, wanted, like))
    })
}

/// The blocks that each query chooses by the means of their keys, `most` at most, where products pick them.
pub(crate) fn picks(call: &EstimateInputs, block: usize, most: usize) -> Option<Tensor<4, Int>> {
    let wanted = GateSizes {
        lists: lists(call),
        seq: seq(call),
        width: call.q.dims()[3],
        block,
        most,
    };
    let device = cube::of(&call.q.device())?;
    let element = dtype_to_elem_type(call.q.dtype());
    let can = call.causal && is_served(call, &[wanted.lists[0] * wanted.seq[0] * most]);
    (can && wanted.is_served(&device.client(), element)).then(|| {
        let [q, k] = primitives(call);
        Tensor::from_dispatch(<Dispatch as EstimateOps>::query_picks(q, k, wanted))
    })
}
