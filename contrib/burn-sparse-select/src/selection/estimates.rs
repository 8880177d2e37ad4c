//! Block scores by kernels, on devices that have them. `None` means that the caller has to use Burn's operations: the device has no kernels, or the number of
//! elements exceeds their indices.

use std::ops::Range;

use crate::kernels::selection::GateSizes;
use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{Dispatch, DispatchTensor};
use burn::tensor::{DType, Int, Tensor};

use crate::selection::estimate_backend::available;
use crate::selection::estimate_ops::{BlockScores, EstimateOps, ScoredBy};
use crate::selection::estimator::EstimateInputs;
use burn_blocksparse::internal::device::cube;

/// Returns whether kernels serve a call whose buffers have these numbers of elements.
fn is_served(call: &EstimateInputs, numbers: &[usize]) -> bool {
    let is_float = |dtype| matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    // No call has a product of lengths that overflows 64 bits.
    let few = numbers
        .iter()
        .all(|&numbers| i32::try_from(numbers).is_ok());
    let device = cube::of(&call.q.device());
    few && is_float(call.q.dtype())
        && call.q.dims()[2] > 0
        && call.k.dims()[2] > 0
        && device.is_some_and(|device| available(&device))
}

/// Returns `batch · heads` of queries and of keys.
fn lists(call: &EstimateInputs) -> [usize; 2] {
    [&call.q, &call.k].map(|x| {
        let [batch, heads, ..] = x.dims();
        batch * heads
    })
}

fn seq(call: &EstimateInputs) -> [usize; 2] {
    [&call.q, &call.k].map(|x| x.dims()[2])
}

fn primitives(call: &EstimateInputs) -> [DispatchTensor; 2] {
    [&call.q, &call.k].map(|x| x.clone().into_dispatch())
}

/// Returns the scores of a range of rows of blocks.
pub(crate) fn scores(
    call: &EstimateInputs,
    block: usize,
    rows: &Range<usize>,
    by: ScoredBy,
) -> Option<Tensor<4>> {
    let ([lists, _], [seq_q, seq_kv]) = (lists(call), seq(call));
    let of_last = |queries: usize| {
        let products = (queries.min(seq_q)).checked_mul(seq_kv.next_multiple_of(8))?;
        Some(products.max(2 * lists * (seq_kv + 2 * block)))
    };
    let between = match by {
        // At least one row of blocks is computed at a time.
        ScoredBy::Antidiagonals { stride } => {
            lists * (block / stride) * seq_kv.div_ceil(stride).next_multiple_of(8)
        }
        ScoredBy::Lines { queries, .. } => of_last(queries)?,
        ScoredBy::Flex { .. } => of_last(block)?,
        ScoredBy::Means | ScoredBy::Alike { .. } => 0,
    };
    let all = lists * seq_q.div_ceil(block) * seq_kv.div_ceil(block);
    is_served(call, &[all, between]).then(|| {
        let wanted = BlockScores {
            block,
            rows: rows.clone(),
            factor: call.scale,
            causal: call.causal,
            by,
        };
        let [q, k] = primitives(call);
        Tensor::from_dispatch(<Dispatch as EstimateOps>::block_scores(q, k, wanted))
    })
}

/// Returns the blocks that each query selects by the means of their keys, at most `most`, where a kernel does this.
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
