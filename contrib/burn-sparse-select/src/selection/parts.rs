//! Helpers to compute scores in parts, which bounds the size of intermediate tensors, and visibility within a part.

use std::ops::Range;

use blocksparse::ScoreGrid;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Device, Int, Tensor};

use crate::selection::estimator::EstimateInputs;
use burn_blocksparse::OpError;

/// Upper bound of the elements of an intermediate tensor: 64 MiB of f32. A single head may exceed it.
pub(crate) const NUMBERS: usize = 1 << 24;

/// Mask value of logits. It is finite, so a row of masked logits gives no NaN.
pub(crate) const NOTHING: f64 = -1e30;

/// Computes `[batch, heads, x, y]` for some heads at a time. `numbers` is the number of intermediate elements per query head. `of` maps queries
/// `[parts, group, seq_q, head_dim]` and keys `[parts, 1, seq_kv, head_dim]` to `[parts, group, x, y]`.
pub(crate) fn by_heads(
    call: &EstimateInputs,
    numbers: usize,
    of: impl Fn(Tensor<4>, Tensor<4>) -> Tensor<4>,
) -> Tensor<4> {
    let [batch, heads, seq_q, dim] = call.q.dims();
    let [_, kv_heads, seq_kv, _] = call.k.dims();
    let (group, all) = (call.group(), batch * kv_heads);
    let q = call.q.clone().reshape([all, group, seq_q, dim]);
    let k = call.k.clone().reshape([all, 1, seq_kv, dim]);
    let numbers = numbers.max(1);
    let members = (NUMBERS / numbers).clamp(1, group);
    let together = (NUMBERS / (numbers * group).max(seq_kv * dim)).clamp(1, all.max(1));
    let mut parts = Vec::new();
    for range in in_steps(0..all, together) {
        let (q, k) = (
            q.clone().slice_dim(0, range.clone()),
            k.clone().slice_dim(0, range),
        );
        let members = in_steps(0..group, members)
            .map(|members| of(q.clone().slice_dim(1, members), k.clone()));
        parts.push(joined(members.collect(), 1));
    }
    let whole = joined(parts, 0);
    let [_, _, x, y] = whole.dims();
    whole.reshape([batch, heads, x, y])
}

/// Splits a range into ranges of `step`; the last one may be shorter.
pub(crate) fn in_steps(all: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let end = all.end;
    all.step_by(step)
        .map(move |start| start..(start + step).min(end))
}

/// Adds a term to a sum that may not exist yet.
pub(crate) fn added<const D: usize>(sum: Option<Tensor<D>>, term: Tensor<D>) -> Tensor<D> {
    match sum {
        None => term,
        Some(sum) => sum + term,
    }
}

/// Concatenates tensors, and returns a single one as it is.
pub(crate) fn joined<const D: usize, K: Basic>(
    mut parts: Vec<Tensor<D, K>>,
    dim: usize,
) -> Tensor<D, K> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, dim),
    }
}

/// Pads with zeros before and after, along a dimension.
pub(crate) fn padded<const D: usize>(
    x: Tensor<D>,
    dim: usize,
    [before, behind]: [usize; 2],
) -> Tensor<D> {
    let zeros = |count: usize| {
        let mut dims = x.dims();
        dims[dim] = count;
        (count > 0).then(|| Tensor::zeros(dims, (&x.device(), x.dtype())))
    };
    let (before, behind) = (zeros(before), zeros(behind));
    let parts = before.into_iter().chain([x]).chain(behind);
    joined(parts.collect(), dim)
}

/// Returns true where no query of a row sees any key of a column: `[.., rows, columns]`. Rows and columns beyond the grid are hidden.
pub(crate) fn hidden<const D: usize>(
    grid: &ScoreGrid,
    rows: Range<usize>,
    all: [usize; D],
    device: &Device,
) -> Tensor<D, Bool> {
    let [first, end] = [rows.start, rows.end].map(|row| row as i64);
    let columns = all[D - 1];
    let dims = [rows.len(), columns];
    let rows = Tensor::<1, Int>::arange(first..end, device) * grid.query_rows as i64;
    let last = match grid.causal {
        true => {
            let offset = grid.seq_kv as i64 - grid.seq_q as i64;
            let end = (rows.clone() + grid.query_rows as i64).clamp_max(grid.seq_q as i64);
            end - 1 + offset
        }
        false => rows.zeros_like() + (grid.seq_kv as i64 - 1),
    };
    let last = last.mask_fill(rows.greater_equal_elem(grid.seq_q as i64), -1);
    let starts = Tensor::<1, Int>::arange(0..columns as i64, device) * grid.block as i64;
    let starts = starts.reshape([1, columns]).expand(dims);
    let hidden = starts.greater(last.reshape([dims[0], 1]).expand(dims));
    hidden.unsqueeze::<D>().expand(all)
}

/// Computes the softmax of rows over the elements that are not hidden. Rows without any are 0.
pub(crate) fn softmax_of_seen(x: Tensor<4>, hidden: Tensor<4, Bool>) -> Tensor<4> {
    let x = x.mask_fill(hidden.clone(), NOTHING);
    burn::tensor::activation::softmax(x, 3).mask_fill(hidden, 0.0)
}

/// Computes [`softmax_of_seen`] in f64, where `None` is hidden.
pub(crate) fn softmax_reference(x: &[Option<f64>]) -> Vec<f64> {
    let largest = x.iter().flatten().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    let weights = x.iter().map(|x| x.map_or(0.0, |x| (x - largest).exp()));
    let weights: Vec<f64> = weights.collect();
    let sum: f64 = weights.iter().sum();
    // Avoids division by zero if all elements are hidden.
    let sum = if sum > 0.0 { sum } else { 1.0 };
    weights.iter().map(|weight| weight / sum).collect()
}

/// Returns rows of queries or keys in f32: `[.., rows, ..]`.
pub(crate) fn rows_of(x: &Tensor<4>, rows: Range<usize>) -> Tensor<4> {
    x.clone().slice_dim(2, rows).cast(DType::F32)
}

/// Number of adjacent queries that are compared.
const NEIGHBOURS: usize = 8;

/// Checks that an expected overlap is from 0 to 1.
pub(crate) fn checked_overlap(overlap: f64) -> Result<f64, OpError> {
    blocksparse::ensure! { OpError; (0.0..=1.0).contains(&overlap) => "overlap", "from 0 to 1", overlap; }
    Ok(overlap)
}

/// Returns the overlap of the lists of eight adjacent queries, `(8 − u) / 7`, where `u` is the size of their union relative to one list; 1 without any lists.
/// Lists are `[batch, lists, queries, most]`; negative entries are empty. Only groups of eight are counted in which `chooses`, called with a query and its
/// list's length, is true for all.
///
/// Reads all lists back and counts on the host.
pub(crate) fn overlap_of(lists: &Tensor<4, Int>, chooses: impl Fn(usize, usize) -> bool) -> f64 {
    let [.., queries, most] = lists.dims();
    let numbers = lists.clone().into_data().convert::<i64>();
    let numbers = numbers.into_vec::<i64>().expect("converted so");
    let (mut in_unions, mut in_lists) = (0, 0);
    for of_head in numbers.chunks(queries * most) {
        for (group, lists) in of_head.chunks_exact(NEIGHBOURS * most).enumerate() {
            let own = lists
                .chunks(most)
                .map(|list| list.iter().filter(|&&key| key >= 0));
            let mut queries = own.clone().zip(group * NEIGHBOURS..);
            if queries.all(|(list, query)| chooses(query, list.count())) {
                let mut all: Vec<i64> = own.flatten().copied().collect();
                in_lists += all.len();
                all.sort_unstable();
                all.dedup();
                in_unions += all.len();
            }
        }
    }
    if in_lists == 0 {
        return 1.0;
    }
    let count = NEIGHBOURS as f64;
    (count - count * in_unions as f64 / in_lists as f64) / (count - 1.0)
}
