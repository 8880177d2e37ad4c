//! Block-sparse attention in Burn primitives: what every backend without kernels of its own runs, and
//! what kernels are checked against.
//!
//! Query tiles of `b` rows that see equally many key blocks, `L`, form a batch; the key blocks of each
//! are gathered side by side, and everything is a batched dense product:
//!
//! ```text
//! q  [T, b, d]   k, v  [T, L·b, d]
//! s  = scale · q · kᵀ            [T, b, L·b]      s = c · tanh(s / c) with a softcap; biases
//! s  = −∞ where not allowed                       only the first, partial blocks need it
//! p  = softmax(s)                                 lse = max(s) − ln(max(p))
//! o  = p · v                     p ∘ mask / (1 − probability) with dropout, and so dP
//!
//! delta = rowsum(dO ∘ O) − dlse   dP = dO · vᵀ
//! dS = p ∘ (dP − delta) · scale   (∘ (1 − tanh²) with a softcap)
//! dQ = dS · k                     dK += dSᵀ · q     dV += pᵀ · dO
//! ```
//!
//! A chunk of tiles is in memory at a time, so memory is O(n · d) plus a constant (plus the weights, if
//! they are stored). Sums run in a fixed order: the same input gives the same bits.

mod attention_sums;
mod diagonals;
mod gather;
mod plan;
mod scores;
mod tiles;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};

use crate::base::values::{
    AttentionGrads, AttentionInputs, AttentionOutput, LayoutTensors, NeedsGrad, OptFloat,
    OutputGrads, SavedTensors, ScoreTensors,
};
use crate::options::{AttentionOptions, WeightsMode};
pub(crate) use attention_sums::attention_sums;
use diagonals::diagonals_of;
use gather::{Chunk, Problem};
use scores::{Scores, largest_scores, log_sum_exp, scores, softmax};
pub(crate) use tiles::{tile, untile};

pub(crate) fn forward<B: Backend>(
    inputs: AttentionInputs<B>,
    layout: &LayoutTensors<B>,
    options: &AttentionOptions,
) -> AttentionOutput<B> {
    let problem = Problem::<B>::new(&inputs, layout, options);
    let dtype: FloatDType = inputs.q.dtype().into();
    let tiles = problem.tile_inputs(inputs);

    let mut out = problem.zeros([problem.num_q_tiles(), problem.b * problem.value_dim]);
    let mut lse = RowTiles::new(&problem);
    let mut max_scores = options.max_scores.then(|| RowTiles::new(&problem));
    let mut weights = match options.weights {
        WeightsMode::Store => Some(problem.zeros(problem.weight_rows())),
        WeightsMode::Recompute => None,
    };
    for chunk in problem.chunks() {
        let q = problem.gather_queries(&tiles.q, &chunk);
        let k = problem.gather_keys(&tiles.k, &chunk);
        let v = problem.gather_keys(&tiles.v, &chunk);
        let Scores { s, .. } = scores(&problem, q, k, Some(&tiles), &chunk);
        let p = softmax(&problem, s.clone(), &chunk);
        let largest = largest_scores(&problem, s, &chunk);
        let sums = log_sum_exp(&problem, largest.clone(), p.clone(), &chunk);
        lse.push(&problem, &chunk, sums);
        if let Some(tiles) = &mut max_scores {
            tiles.push(&problem, &chunk, largest);
        }
        if let Some(all) = weights.take() {
            let blocks = problem.split_blocks(p.clone(), &chunk);
            weights = Some(problem.add_rows(all, chunk.weight_places(&problem), blocks));
        }
        let p = match problem.dropout_factors(&chunk) {
            Some(factors) => B::float_mul(p, factors),
            None => p,
        };
        let rows = B::float_matmul(p, v);
        out = problem.add_rows(out, chunk.query_tiles(&problem), rows);
    }
    AttentionOutput {
        out: B::float_cast(problem.untile_queries(out), dtype),
        lse: lse.finish(&problem),
        weights: weights.map(|weights| problem.shape_weights(weights)).into(),
        max_scores: max_scores.map(|tiles| tiles.finish(&problem)).into(),
    }
}

pub(crate) fn backward<B: Backend>(
    saved: SavedTensors<B>,
    grads: OutputGrads<B>,
    layout: &LayoutTensors<B>,
    options: &AttentionOptions,
    wanted: NeedsGrad,
) -> AttentionGrads<B> {
    let SavedTensors { inputs, output } = saved;
    let problem = Problem::<B>::new(&inputs, layout, options);
    let dtype: FloatDType = inputs.q.dtype().into();
    let b = problem.b;
    let tiles = problem.tile_inputs(inputs);
    let grad_out = problem.accumulate(grads.out);
    let mut delta = B::float_sum_dim(
        B::float_mul(grad_out.clone(), problem.accumulate(output.out)),
        3,
    );
    if let OptFloat::Some(grad_lse) = grads.lse {
        // A row without keys has p = 0; whatever the gradient is there, 0 · ∞ must not enter.
        let empty = B::float_is_inf(output.lse, layout.blocked.dtype().into());
        let grad_lse = B::float_mask_fill(grad_lse, empty, 0.0.into());
        let grad_lse = B::float_reshape(grad_lse, delta.shape());
        delta = B::float_sub(delta, grad_lse);
    }
    let grad_out = problem.tile(grad_out);
    let delta = problem.tile(delta);
    let weights = output.weights.into_option();
    let weights = weights.map(|weights| problem.tile_weights(weights));

    let mut dq = problem.zeros([problem.num_q_tiles(), b * problem.head_dim]);
    let mut dk = problem.zeros([problem.num_kv_tiles(), b * problem.head_dim]);
    let mut d_bias = (tiles.bias.as_ref().filter(|_| wanted.bias))
        .map(|bias| problem.zeros(bias.shape().dims::<2>()));
    let mut diagonals = (tiles.relative.as_ref().filter(|_| wanted.relative_bias))
        .map(|_| problem.zeros([problem.num_diagonals(), 2 * b - 1]));
    let mut dv = problem.zeros([problem.num_kv_tiles(), b * problem.value_dim]);
    for chunk in problem.chunks() {
        let q = problem.gather_queries(&tiles.q, &chunk);
        let k = problem.gather_keys(&tiles.k, &chunk);
        let v = problem.gather_keys(&tiles.v, &chunk);
        let d_out = problem.gather_queries(&grad_out, &chunk);
        let delta = problem.gather_queries(&delta, &chunk);
        let (p, tanh) = match &weights {
            Some(weights) => {
                // The softcap's derivative needs the scores; the weights alone are not enough.
                let tanh = options
                    .softcap
                    .and_then(|_| scores(&problem, q.clone(), k.clone(), None, &chunk).tanh);
                (problem.gather_weights(weights, &chunk), tanh)
            }
            None => {
                let Scores { s, tanh } =
                    scores(&problem, q.clone(), k.clone(), Some(&tiles), &chunk);
                (softmax(&problem, s, &chunk), tanh)
            }
        };
        let mut dp = B::float_matmul(d_out.clone(), B::float_transpose(v));
        let mut kept = p.clone();
        if let Some(factors) = problem.dropout_factors(&chunk) {
            dp = B::float_mul(dp, factors.clone());
            kept = B::float_mul(kept, factors);
        }
        let dv_rows = B::float_matmul(B::float_transpose(kept), d_out);
        let mut ds = B::float_mul(B::float_sub(dp, delta), p);
        if let Some(sums) = d_bias.take() {
            let rows = problem.bias_rows(ds.clone(), &chunk);
            d_bias = Some(problem.add_rows(sums, chunk.bias_places(&problem), rows));
        }
        if let Some(sums) = diagonals.take() {
            let rows = diagonals_of::<B>(problem.split_blocks(ds.clone(), &chunk), b);
            diagonals = Some(problem.add_rows(sums, chunk.diagonal_places(&problem), rows));
        }
        if let Some(tanh) = tanh {
            let slope = B::float_neg(B::float_mul(tanh.clone(), tanh));
            ds = B::float_mul(ds, B::float_add_scalar(slope, 1.0.into()));
        }
        // q carries the scale already; dq needs it once more, k does not carry it.
        let dq_rows = B::float_mul_scalar(B::float_matmul(ds.clone(), k), problem.scale.into());
        let dk_rows = B::float_matmul(B::float_transpose(ds), q);
        dq = problem.add_rows(dq, chunk.query_tiles(&problem), dq_rows);
        dk = problem.add_rows(dk, chunk.key_tiles(&problem), dk_rows);
        dv = problem.add_rows(dv, chunk.key_tiles(&problem), dv_rows);
    }
    AttentionGrads {
        q: B::float_cast(problem.untile_queries(dq), dtype),
        k: B::float_cast(problem.untile_keys(dk), dtype),
        v: B::float_cast(problem.untile_keys(dv), dtype),
        scores: ScoreTensors {
            bias: d_bias
                .map(|rows| B::float_cast(problem.untile_bias(rows), dtype))
                .into(),
            relative_bias: diagonals.map(|sums| problem.distances_of(sums)).into(),
        },
    }
}

/// Collects a number of each row (lse, the largest score) tile by tile, in the order the chunks come, and puts the tiles in place at the end.
struct RowTiles<B: Backend> {
    /// Tile 0 is −∞: that of block rows no chunk has.
    parts: Vec<FloatTensor<B>>,
    collected: usize,
    place_of: Vec<i32>,
}

impl<B: Backend> RowTiles<B> {
    fn new(problem: &Problem<B>) -> Self {
        let none = B::float_full(
            Shape::new([1, problem.b]),
            f64::NEG_INFINITY.into(),
            &problem.device,
            problem.dtype,
        );
        Self {
            parts: vec![none],
            collected: 1,
            place_of: vec![0; problem.num_q_tiles()],
        }
    }

    fn push(&mut self, problem: &Problem<B>, chunk: &Chunk, rows: FloatTensor<B>) {
        for (place, tile) in (self.collected..).zip(chunk.query_tiles(problem)) {
            self.place_of[tile as usize] = place as i32;
        }
        self.collected += chunk.tiles.len();
        self.parts.push(rows);
    }

    /// `[batch, heads, seq_q]`
    fn finish(self, problem: &Problem<B>) -> FloatTensor<B> {
        let tiles = B::float_cat(self.parts, 0);
        let rows = B::float_select(tiles, 0, problem.indices(self.place_of));
        let rows = problem.untile_queries(rows);
        let shape = [problem.batch, problem.heads, problem.seq_q];
        B::float_reshape(rows, Shape::new(shape))
    }
}
