//! Columns and diagonals of the attention matrix: their sums over the last queries, the selection of the heaviest, and the blocks that these touch.

use std::ops::Range;

use blocksparse::ScoreGrid;
use burn::tensor::{Int, Tensor};

use crate::selection::estimator::{EstimateGrid, EstimateInputs, ReferenceInputs, dot};
use crate::selection::mean::products;
use crate::selection::parts::{
    by_heads, hidden, padded, rows_of, softmax_of_seen, softmax_reference,
};

/// Number of halvings of a search: f32 numbers of 130 powers of two have 2³⁰·⁰² values.
const HALVINGS: usize = 32;

/// Lower end of a search. Smaller numbers count as 0.
const LEAST: f32 = 1e-37;

/// Relative difference below which two numbers count as equal.
const APART: f64 = 1e-6;

/// Weight of an element in a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// Each element counts as 1.
    Count,
    /// Each element counts by its value.
    Sum,
}

/// Sums of attention of the last queries, each in a softmax over all keys that it sees: `[batch · heads, seq_kv]` each.
pub(crate) struct LineSums {
    /// Sum for each key.
    pub columns: Tensor<2>,
    /// Sum for each distance from a query back to a key.
    pub distances: Tensor<2>,
}

/// Computes the sums over the last `queries` queries of a causal call.
pub(crate) fn line_sums(call: &EstimateInputs, queries: usize) -> LineSums {
    let [batch, heads, seq_q, _] = call.q.dims();
    let seq_kv = call.k.dims()[2];
    let queries = queries.min(seq_q);
    let width = seq_kv + queries - 1;
    let grid = EstimateGrid::by_query(1).of([seq_q, seq_kv], true);
    let sums = by_heads(call, queries * (width + 1), |q, k| {
        let [parts, group, ..] = q.dims();
        let members = parts * group;
        let rows = seq_q - queries..seq_q;
        let q = rows_of(&q, rows.clone()) * call.scale;
        let x = products(q, rows_of(&k, 0..seq_kv), group);
        let dims = [parts, group, queries, seq_kv];
        let hidden = hidden(&grid, rows, dims, &x.device());
        let p = softmax_of_seen(x, hidden);
        let columns = p.clone().sum_dim(2);
        // Reinterpreted with rows one element longer, each row starts one place later: a diagonal of keys becomes a column.
        let p = padded(p.reshape([members, queries, seq_kv]), 2, [queries - 1, 0]);
        let p = padded(p.reshape([members, queries * width]), 1, [0, queries]);
        let p = p.reshape([members, queries, width + 1]);
        // The last column holds the queries' own keys.
        let distances = p.slice_dim(2, 0..seq_kv).sum_dim(1).flip([2]);
        let distances = distances.reshape([parts, group, 1, seq_kv]);
        Tensor::cat(vec![columns, distances], 2)
    });
    let line = |which: usize| {
        let line = sums.clone().slice_dim(2, which..which + 1);
        line.reshape([batch * heads, seq_kv])
    };
    LineSums {
        columns: line(0),
        distances: line(1),
    }
}

/// Computes the sums of columns and of distances in f64 loops.
pub(crate) fn line_sums_reference(
    call: &ReferenceInputs,
    head: usize,
    queries: usize,
) -> [Vec<f64>; 2] {
    let (n, queries) = (call.seq_kv, queries.min(call.seq_q));
    let [mut columns, mut distances] = [(); 2].map(|_| vec![0.0; n]);
    for i in call.seq_q - queries..call.seq_q {
        let position = (i + n) as i64 - call.seq_q as i64;
        let seen = (position + 1).max(0) as usize;
        let product = |j| dot(call.query(head, i), call.key(head, j)) * call.scale;
        let p = softmax_reference(&(0..seen).map(|j| Some(product(j))).collect::<Vec<_>>());
        for (j, p) in p.into_iter().enumerate() {
            columns[j] += p;
            distances[seen - 1 - j] += p;
        }
    }
    [columns, distances]
}

/// Marks the largest elements of each row with 1 and the others with 0: as many as it takes to reach `limit`, `[rows, 1]`. Elements that are equal up to
/// rounding are all kept or all dropped; 0 is never kept.
///
/// `x` is not negative. Nothing is sorted, because some devices sort on the host. Instead the smallest kept element is found by bisection with geometric means,
/// using sums of the elements that are not smaller.
pub(crate) fn largest(x: Tensor<2>, by: By, limit: Tensor<2>) -> Tensor<2> {
    let dims = x.dims();
    let kept = |least: Tensor<2>| {
        let kept = x.clone().greater_equal(least.expand(dims));
        kept.float().cast(x.dtype())
    };
    let mut low = limit.zeros_like() + LEAST;
    let mut high = x.clone().max_dim(1) * 1.001 + 2.0 * LEAST;
    for _ in 0..HALVINGS {
        let middle = low.clone().sqrt() * high.clone().sqrt();
        let kept = kept(middle.clone());
        let reached = match by {
            By::Count => kept.sum_dim(1),
            By::Sum => (kept * x.clone()).sum_dim(1),
        };
        let is_enough = reached.greater_equal(limit.clone());
        low = low.mask_where(is_enough.clone(), middle.clone());
        high = middle.mask_where(is_enough, high);
    }
    kept(low * (1.0 - APART))
}

/// Computes [`largest`] in f64.
pub(crate) fn largest_reference(x: &[f64], by: By, limit: f64) -> Vec<bool> {
    let mut sorted = x.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let mut reached = 0.0;
    let mut least = f64::INFINITY;
    for number in sorted {
        if reached >= limit {
            break;
        }
        least = number;
        reached += match by {
            By::Count => 1.0,
            By::Sum => number,
        };
    }
    let least = least * (1.0 - APART);
    x.iter().map(|&x| x >= least && x > 0.0).collect()
}

/// Marks the blocks that contain a kept column or distance with 1: `[lines, rows, blocks]`, from 0/1 lines `[lines, seq_kv]`.
///
/// A row of queries and a key block cover all distances between two complete blocks at their positions.
pub(crate) fn touched(
    columns: Tensor<2>,
    distances: Tensor<2>,
    grid: &ScoreGrid,
    rows: Range<usize>,
) -> Tensor<3> {
    let (b, n, blocks) = (grid.block, grid.seq_kv, grid.blocks());
    let lines = columns.dims()[0];
    let columns = padded(columns, 1, [0, blocks * b - n]);
    let columns = columns.reshape([lines, blocks, b]).max_dim(2);
    let columns = columns.reshape([lines, blocks]);
    let distances = parts_of(distances, grid);
    let parts = distances.dims()[1];
    let all = distances.clone().max_dim(2);
    let but_first = distances.slice_dim(2, 1..b).max_dim(2);
    let but_first = padded(but_first, 1, [1, 0]).slice_dim(1, 0..parts);
    let parts_kept = all.max_pair(but_first).reshape([lines, parts]);
    touched_wholly(columns, parts_kept, grid, rows)
}

/// Splits distances into parts of one block each, `[lines, parts, block]`. The second part starts at the offset between the first position of a row and that of
/// the block it lies in, so the first part starts below 0.
fn parts_of(distances: Tensor<2>, grid: &ScoreGrid) -> Tensor<3> {
    let [lines, n] = distances.dims();
    let before = grid.block - first_distance(grid);
    let parts = (before + n).div_ceil(grid.block);
    let behind = parts * grid.block - before - n;
    let distances = padded(distances, 1, [before, behind]);
    distances.reshape([lines, parts, grid.block])
}

/// Returns the offset of a row's first position from the start of the key block that contains it.
fn first_distance(grid: &ScoreGrid) -> usize {
    let offset = grid.seq_kv as i64 - grid.seq_q as i64;
    offset.rem_euclid(grid.block as i64) as usize
}

/// Selects complete key blocks and parts of distances by the largest sums, at least `count` of each: 1 and 0 of `[lines, rows, blocks]`. The first block and
/// those that a row lies in are included.
pub(crate) fn heaviest_blocks(
    sums: &LineSums,
    count: usize,
    grid: &ScoreGrid,
    rows: Range<usize>,
) -> Tensor<3> {
    let (b, n, blocks) = (grid.block, grid.seq_kv, grid.blocks());
    let lines = sums.columns.dims()[0];
    let columns = padded(sums.columns.clone(), 1, [0, blocks * b - n]);
    let columns = columns.reshape([lines, blocks, b]).sum_dim(2);
    let distances = parts_of(sums.distances.clone(), grid).sum_dim(2);
    let parts = distances.dims()[1];
    // A row's positions lie in blocks of two parts, one of which may be empty.
    let columns = largest_behind(columns.reshape([lines, blocks]), count, OWN[0]);
    let parts = largest_behind(
        distances.reshape([lines, parts]),
        count.saturating_add(1),
        OWN[1],
    );
    touched_wholly(columns, parts, grid, rows)
}

/// Number of forced parts: of columns the first, of distances those of a row's own positions.
const OWN: [usize; 2] = [1, 2];

/// Marks the `all` largest elements of each row with 1. The first `forced` ones are included.
pub(crate) fn largest_behind(sums: Tensor<2>, all: usize, forced: usize) -> Tensor<2> {
    let [lines, n] = sums.dims();
    let forced = forced.min(n);
    if forced == n {
        return sums.ones_like();
    }
    let rest = sums.clone().slice_dim(1, forced..n);
    let count = all.saturating_sub(forced).min(n) as f32;
    let limit = Tensor::full([lines, 1], count, (&sums.device(), sums.dtype()));
    let rest = largest(rest, By::Count, limit);
    // With operator fusion, a slice of nothing has been seen to corrupt its neighbours on WGPU.
    if forced == 0 {
        return rest;
    }
    let first = sums.slice_dim(1, 0..forced).ones_like();
    Tensor::cat(vec![first, rest], 1)
}

/// Computes [`largest_behind`] in f64.
pub(crate) fn largest_behind_reference(sums: &[f64], all: usize, forced: usize) -> Vec<bool> {
    let forced = forced.min(sums.len());
    let rest = all.saturating_sub(forced) as f64;
    let mut kept = vec![true; forced];
    kept.extend(largest_reference(&sums[forced..], By::Count, rest));
    kept
}

/// Marks the blocks of kept block columns `[lines, blocks]` or of kept parts of distances `[lines, parts]`, all 1 and 0: `[lines, rows, blocks]`.
fn touched_wholly(
    columns: Tensor<2>,
    parts_kept: Tensor<2>,
    grid: &ScoreGrid,
    rows: Range<usize>,
) -> Tensor<3> {
    let (b, blocks, count) = (grid.block as i64, grid.blocks(), rows.len());
    let [lines, parts] = parts_kept.dims();
    let dims = [lines, count, blocks];
    let columns = columns.reshape([lines, 1, blocks]).expand(dims);
    let offset = grid.seq_kv as i64 - grid.seq_q as i64;
    let device = parts_kept.device();
    let ints = |range: Range<i64>| Tensor::<1, Int>::arange(range, &device);
    let of_rows = ints(rows.start as i64..rows.end as i64) + (offset.div_euclid(b) + 1);
    let of_rows = of_rows.reshape([count, 1]).expand([count, blocks]);
    let of_blocks = ints(0..blocks as i64).reshape([1, blocks]);
    let part = of_rows - of_blocks.expand([count, blocks]);
    // Distances beyond the parts are not visible.
    let part = part.clamp(0, parts as i64 - 1).reshape([count * blocks]);
    parts_kept.select(1, part).reshape(dims).max_pair(columns)
}

/// Computes [`touched`] for one row and block, by the kept keys and distances.
pub(crate) fn is_touched(
    lines: &[Vec<bool>; 2],
    grid: &ScoreGrid,
    row: usize,
    block: usize,
) -> bool {
    let [columns, distances] = lines;
    let (b, n) = (grid.block, grid.seq_kv);
    let apart = grid.positions(row)[0] - (block * b) as i64;
    let within = |from: i64, to: i64| {
        let [from, to] = [from, to].map(|at| at.clamp(0, n as i64) as usize);
        from..to.max(from)
    };
    let own = within((block * b) as i64, (block * b + b) as i64);
    let between = within(apart - b as i64 + 1, apart + b as i64);
    columns[own].iter().any(|&kept| kept) || distances[between].iter().any(|&kept| kept)
}

/// Computes [`heaviest_blocks`] of a head, `[rows][blocks]`, in f64 loops.
pub(crate) fn heaviest_blocks_reference(
    [columns, distances]: &[Vec<f64>; 2],
    count: usize,
    grid: &ScoreGrid,
) -> Vec<bool> {
    let (b, first) = (grid.block, first_distance(grid));
    let columns: Vec<f64> = columns.chunks(b).map(|part| part.iter().sum()).collect();
    let mut parts = vec![distances[..first.min(distances.len())].iter().sum()];
    let rest = distances.get(first..).unwrap_or_default().chunks(b);
    parts.extend(rest.map(|part| part.iter().sum::<f64>()));
    let columns = largest_behind_reference(&columns, count, OWN[0]);
    let parts = largest_behind_reference(&parts, count.saturating_add(1), OWN[1]);
    let mut kept = Vec::with_capacity(grid.rows() * grid.blocks());
    for row in 0..grid.rows() {
        for (block, &by_column) in columns.iter().enumerate() {
            let apart = grid.positions(row)[0] - (block * b) as i64;
            // Part 1 starts at the first distance.
            let part = (apart - first as i64).div_euclid(b as i64) + 1;
            let by_distance = usize::try_from(part).ok().and_then(|part| parts.get(part));
            kept.push(by_column || by_distance.is_some_and(|&kept| kept));
        }
    }
    kept
}
