//! Columns and diagonals of attention: what the last queries give them, which are kept, and which blocks those touch.

use std::ops::Range;

use blocksparse::ScoreGrid;
use burn::tensor::{Int, Tensor};

use super::estimator::{DenseCall, ScoreCall, dot};
use super::mean::products;
use super::parts::{by_heads, hidden, padded, rows_of, softmax_of_seen, softmax_reference};

/// Halvings of a search: f32 numbers of 130 powers of two have 2³⁰·⁰² places.
const HALVINGS: usize = 32;

/// What a search begins with: anything less counts as 0.
const LEAST: f32 = 1e-37;

/// Numbers that are less apart, in parts of them, are as good as equal.
const APART: f64 = 1e-6;

/// How a search weighs numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// As one each.
    Count,
    /// By what they are.
    Sum,
}

/// What the last queries give, with every key that they see in one softmax: `[batch · heads, seq_kv]` each.
pub(crate) struct LineSums {
    /// To each key.
    pub columns: Tensor<2>,
    /// To each distance from a query back to a key.
    pub distances: Tensor<2>,
}

/// The sums of so many last queries of a causal call.
pub(crate) fn line_sums(call: &ScoreCall, queries: usize) -> LineSums {
    let [batch, heads, seq_q, _] = call.q.dims();
    let seq_kv = call.k.dims()[2];
    let queries = queries.min(seq_q);
    let width = seq_kv + queries - 1;
    let grid = ScoreGrid {
        query_rows: 1,
        block: 1,
        seq_q,
        seq_kv,
        causal: true,
    };
    let sums = by_heads(call, queries * (width + 1), |q, k| {
        let [parts, group, ..] = q.dims();
        let members = parts * group;
        let rows = seq_q - queries..seq_q;
        let q = rows_of(&q, rows.clone()) * call.scale;
        let x = products(q, rows_of(&k, 0..seq_kv), group);
        let dims = [parts, group, queries, seq_kv];
        let hidden = hidden(&grid, rows, seq_kv, &x.device());
        let p = softmax_of_seen(x, hidden.reshape([1, 1, queries, seq_kv]).expand(dims));
        let columns = p.clone().sum_dim(2);
        // In rows that are one number longer each row begins one place later: a diagonal of keys becomes a column.
        let p = padded(p.reshape([members, queries, seq_kv]), 2, [queries - 1, 0]);
        let p = padded(p.reshape([members, queries * width]), 1, [0, queries]);
        let p = p.reshape([members, queries, width + 1]);
        // The last column is of the queries' own keys.
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

/// The sums of columns and of distances, in plain f64 loops.
pub(crate) fn line_sums_reference(call: &DenseCall, head: usize, queries: usize) -> [Vec<f64>; 2] {
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

/// Of each row those numbers that are largest, as 1, and 0 for the others: as many as it takes for them to reach `limit`, `[rows, 1]`. Those that are equal,
/// or so but for rounding, are all kept or none, and 0 never is.
///
/// `x` is at least 0. Nothing is sorted, which some devices leave to the host: the smallest number that is kept is found by halvings between powers, of the
/// sums of what is no less.
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

/// [`largest`], in f64.
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

/// Blocks that a kept column or distance is in, as 1 and 0: `[lines, rows, blocks]`, of lines `[lines, seq_kv]` of 1 and 0.
///
/// A row of queries and a block of keys have all distances that two whole blocks at their places have.
pub(crate) fn touched(
    columns: Tensor<2>,
    distances: Tensor<2>,
    grid: &ScoreGrid,
    rows: Range<usize>,
) -> Tensor<3> {
    let (b, n, blocks, count) = (grid.block, grid.seq_kv, grid.blocks(), rows.len());
    let lines = columns.dims()[0];
    let dims = [lines, count, blocks];
    let columns = padded(columns, 1, [0, blocks * b - n]);
    let columns = columns.reshape([lines, blocks, b]).max_dim(2);
    let columns = columns.reshape([lines, 1, blocks]).expand(dims);
    // Parts of `b` distances that begin where the distance between the first positions of a row and a block can be; the first begins below 0.
    let offset = n as i64 - grid.seq_q as i64;
    let first = offset.rem_euclid(b as i64);
    let before = b - first as usize;
    let parts = (before + n).div_ceil(b);
    let distances = padded(distances, 1, [before, parts * b - before - n]);
    let distances = distances.reshape([lines, parts, b]);
    let all = distances.clone().max_dim(2);
    let but_first = distances.slice_dim(2, 1..b).max_dim(2);
    let but_first = padded(but_first, 1, [1, 0]).slice_dim(1, 0..parts);
    let parts_kept = all.max_pair(but_first).reshape([lines, parts]);
    let device = parts_kept.device();
    let ints = |range: Range<i64>| Tensor::<1, Int>::arange(range, &device);
    let of_rows = ints(rows.start as i64..rows.end as i64) + ((offset - first) / b as i64 + 1);
    let of_rows = of_rows.reshape([count, 1]).expand([count, blocks]);
    let of_blocks = ints(0..blocks as i64).reshape([1, blocks]);
    let part = of_rows - of_blocks.expand([count, blocks]);
    // What is beyond the parts is not visible.
    let part = part.clamp(0, parts as i64 - 1).reshape([count * blocks]);
    parts_kept.select(1, part).reshape(dims).max_pair(columns)
}

/// [`touched`] of a row and a block, by the keys and the distances that are kept.
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
