//! The scores of a chunk, and reductions of their rows.

use super::gather::{Chunk, Problem, TiledInputs};
use crate::base::prelude::*;

pub(super) struct Scores<B: Backend> {
    /// Scaled, softcapped, biased and masked scores `[T, b, L·b]`.
    pub s: Array<B>,
    /// tanh(score / softcap), unmasked.
    pub tanh: Option<Array<B>>,
}

/// Computes the scores of `q` `[T, b, d]` (scaled) and `k` `[T, L·b, d]`.
pub(super) fn scores<B: Backend>(
    problem: &Problem<B>,
    q: Array<B>,
    k: Array<B>,
    biases: Option<&TiledInputs<B>>,
    chunk: &Chunk,
) -> Scores<B> {
    let mut s = q.matmul(k.transpose());
    let mut tanh = None;
    if let Some(softcap) = problem.softcap {
        let t = Array::<B>(B::float_tanh((s / softcap).0));
        s = t.clone() * softcap;
        tanh = Some(t);
    }
    if let Some(slopes) = &problem.alibi {
        s = s - problem.alibi_penalty(slopes, chunk);
    }
    if let Some(bias) = biases.and_then(|tiles| tiles.bias.as_ref()) {
        s = s + problem.gather_bias(bias, chunk);
    }
    if let Some(table) = biases.and_then(|tiles| tiles.relative.as_ref()) {
        s = s + problem.gather_relative(table, chunk);
    }
    let masked = chunk.shape.partial * problem.b;
    let s = match chunk.shape.partial {
        0 => s,
        partial if partial == chunk.shape.entries => {
            s.fill(problem.blocked(chunk), f64::NEG_INFINITY)
        }
        _ => {
            let part = s.clone().narrow(2, 0..masked);
            let part = part.fill(problem.blocked(chunk), f64::NEG_INFINITY);
            let slices = [Slice::full(), Slice::full(), Slice::from(0..masked)];
            Array::<B>(B::float_slice_assign(s.0, &slices, part.0))
        }
    };
    Scores { s, tanh }
}

/// Computes the row-wise softmax. Rows without keys are zero.
pub(super) fn softmax<B: Backend>(problem: &Problem<B>, s: Array<B>, chunk: &Chunk) -> Array<B> {
    let of = |s: Array<B>| Array::<B>(B::softmax(s.0, 2));
    if !chunk.shape.empty_rows {
        return of(s);
    }
    // A softmax over −∞ alone would be NaN, so such rows get a finite score and are zeroed afterwards.
    let empty = B::bool_expand(problem.empty_rows(chunk), s.shape());
    of(s.fill(empty.clone(), 0.0)).fill(empty, 0.0)
}

/// Returns `max(s)` of each row, `[T, b]`; −∞ in rows without keys.
pub(super) fn largest_scores<B: Backend>(
    problem: &Problem<B>,
    s: Array<B>,
    chunk: &Chunk,
) -> Array<B> {
    rows_of(problem, s.max_dim(2), chunk)
}

/// Computes `ln Σ exp(s)` of each row, `[T, b]`, from its largest score and its weights: the largest weight is `exp(max(s) − lse)`.
pub(super) fn log_sum_exp<B: Backend>(
    problem: &Problem<B>,
    largest: Array<B>,
    p: Array<B>,
    chunk: &Chunk,
) -> Array<B> {
    let weight = p.max_dim(2).log();
    let largest = largest.reshape(weight.shape());
    rows_of(problem, largest - weight, chunk)
}

/// Reshapes one number per row, `[T, b, 1]`, to `[T, b]`, and sets rows without keys, whose maximum is arbitrary, to −∞.
fn rows_of<B: Backend>(problem: &Problem<B>, mut rows: Array<B>, chunk: &Chunk) -> Array<B> {
    if chunk.shape.empty_rows {
        rows = rows.fill(problem.empty_rows(chunk), f64::NEG_INFINITY);
    }
    rows.reshape([chunk.tiles.len(), problem.b])
}
