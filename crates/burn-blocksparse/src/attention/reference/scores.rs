//! The scores of a chunk, and what is made of a row of them.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::gather::{Chunk, Problem, TiledInputs};

pub(super) struct Scores<B: Backend> {
    /// Scaled, softcapped, biased and masked scores `[T, b, L·b]`.
    pub s: FloatTensor<B>,
    /// tanh(score / softcap), not masked.
    pub tanh: Option<FloatTensor<B>>,
}

/// `q` `[T, b, d]` (scaled), `k` `[T, L·b, d]`.
pub(super) fn scores<B: Backend>(
    problem: &Problem<B>,
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    biases: Option<&TiledInputs<B>>,
    chunk: &Chunk,
) -> Scores<B> {
    let mut s = B::float_matmul(q, B::float_transpose(k));
    let mut tanh = None;
    if let Some(softcap) = problem.softcap {
        let t = B::float_tanh(B::float_div_scalar(s, softcap.into()));
        s = B::float_mul_scalar(t.clone(), softcap.into());
        tanh = Some(t);
    }
    if let Some(slopes) = &problem.alibi {
        s = B::float_sub(s, problem.alibi_penalty(slopes, chunk));
    }
    if let Some(bias) = biases.and_then(|tiles| tiles.bias.as_ref()) {
        s = B::float_add(s, problem.gather_bias(bias, chunk));
    }
    if let Some(table) = biases.and_then(|tiles| tiles.relative.as_ref()) {
        s = B::float_add(s, problem.gather_relative(table, chunk));
    }
    let masked = chunk.shape.partial * problem.b;
    let s = match chunk.shape.partial {
        0 => s,
        partial if partial == chunk.shape.entries => {
            B::float_mask_fill(s, problem.blocked(chunk), f64::NEG_INFINITY.into())
        }
        _ => {
            let slices = [Slice::full(), Slice::full(), Slice::from(0..masked)];
            let part = B::float_slice(s.clone(), &slices);
            let part = B::float_mask_fill(part, problem.blocked(chunk), f64::NEG_INFINITY.into());
            B::float_slice_assign(s, &slices, part)
        }
    };
    Scores { s, tanh }
}

/// Row-wise softmax; rows without keys are zero.
pub(super) fn softmax<B: Backend>(
    problem: &Problem<B>,
    s: FloatTensor<B>,
    chunk: &Chunk,
) -> FloatTensor<B> {
    if !chunk.shape.empty_rows {
        return B::softmax(s, 2);
    }
    // A softmax over −∞ alone would be NaN: such rows take any finite score and are zeroed after.
    let shape = s.shape();
    let empty = B::bool_expand(problem.empty_rows(chunk), shape);
    let s = B::float_mask_fill(s, empty.clone(), 0.0.into());
    B::float_mask_fill(B::softmax(s, 2), empty, 0.0.into())
}

/// `max(s)` of each row, `[T, b]`; −∞ in rows without keys.
pub(super) fn largest_scores<B: Backend>(
    problem: &Problem<B>,
    s: FloatTensor<B>,
    chunk: &Chunk,
) -> FloatTensor<B> {
    rows_of(problem, B::float_max_dim(s, 2), chunk)
}

/// `ln Σ exp(s)` of each row, `[T, b]`, of its largest score and its weights: the largest weight is `exp(max(s) − lse)`.
pub(super) fn log_sum_exp<B: Backend>(
    problem: &Problem<B>,
    largest: FloatTensor<B>,
    p: FloatTensor<B>,
    chunk: &Chunk,
) -> FloatTensor<B> {
    let weight = B::float_log(B::float_max_dim(p, 2));
    let largest = B::float_reshape(largest, weight.shape());
    rows_of(problem, B::float_sub(largest, weight), chunk)
}

/// A number of each row, `[T, b, 1]`, as `[T, b]`; −∞ in rows without keys, where a maximum may be anything.
fn rows_of<B: Backend>(
    problem: &Problem<B>,
    mut rows: FloatTensor<B>,
    chunk: &Chunk,
) -> FloatTensor<B> {
    if chunk.shape.empty_rows {
        rows = B::float_mask_fill(rows, problem.empty_rows(chunk), f64::NEG_INFINITY.into());
    }
    B::float_reshape(rows, Shape::new([chunk.tiles.len(), problem.b]))
}
