//! Block-sparse attention in Burn primitives. It runs on every backend without kernels, and kernels are checked against it.
//!
//! Query tiles of `b` rows that see the same number `L` of key blocks form a batch. The key blocks of each tile are gathered side by side, so everything is a
//! batched dense product:
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
//! One chunk of tiles is in memory at a time, so memory is O(n · d) plus a constant (plus the weights, if they are stored). Sums have a fixed order: the same
//! input gives the same bits.

mod attention_sums;
mod diagonals;
mod gather;
mod plan;
mod scores;
mod tiles;

use crate::base::prelude::*;
use crate::base::values::{
    AttentionGrads, AttentionInputs, AttentionOutput, LayoutTensors, NeedsGrad, OutputGrads,
    SavedTensors, ScoreTensors,
};
use crate::options::{AttentionOptions, WeightsMode};
use crate::weights;
pub(crate) use attention_sums::attention_sums;
use diagonals::diagonals_of;
use gather::Problem;
use scores::{Scores, largest_scores, log_sum_exp, scores, softmax};
pub(crate) use tiles::{Scattered, tile, untile};

pub(crate) fn forward<B: Backend>(
    inputs: AttentionInputs<B>,
    layout: &LayoutTensors<B>,
    options: &AttentionOptions,
) -> AttentionOutput<B> {
    let problem = Problem::<B>::new(&inputs, layout, options);
    let dtype: FloatDType = inputs.q.dtype().into();
    let tiles = problem.tile_inputs(inputs);

    let mut out = problem.zeros([problem.num_q_tiles(), problem.b * problem.value_dim]);
    let lowest = || {
        let (shape, lowest) = (Shape::new([1, problem.b]), f64::NEG_INFINITY.into());
        let tile = B::float_full(shape, lowest, &problem.device, problem.dtype);
        Scattered::new(Array::<B>(tile), problem.num_q_tiles())
    };
    let mut lse = lowest();
    let mut max_scores = options.max_scores.then(lowest);
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
        let places = chunk.query_tiles(&problem);
        lse.push(&places, sums);
        if let Some(tiles) = &mut max_scores {
            tiles.push(&places, largest);
        }
        if let Some(all) = weights.take() {
            let blocks = problem.split_blocks(p.clone(), &chunk);
            weights = Some(problem.add_rows(all, chunk.weight_places(&problem), blocks));
        }
        let p = match problem.dropout_factors(&chunk) {
            Some(factors) => p * factors,
            None => p,
        };
        out = problem.add_rows(out, places, p.matmul(v));
    }
    let of_rows = |tiles: Scattered<B>| {
        let rows = problem.untile_queries(tiles.finish());
        rows.reshape([problem.batch, problem.heads, problem.seq_q])
            .0
    };
    let stored = weights::shape(&layout.host, problem.batch);
    AttentionOutput {
        out: problem.untile_queries(out).cast(dtype).0,
        lse: of_rows(lse),
        weights: weights.map(|weights| weights.reshape(stored).0).into(),
        max_scores: max_scores.map(of_rows).into(),
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
    let mut delta = (grad_out.clone() * problem.accumulate(output.out)).sum_dim(3);
    if let OptFloat::Some(grad_lse) = grads.lse {
        // A row without keys has p = 0. Whatever its gradient is, 0 · ∞ must not enter.
        let empty = B::float_is_inf(output.lse, layout.blocked.dtype().into());
        let grad_lse = Array::<B>(grad_lse).fill(empty, 0.0);
        let shape = delta.shape();
        delta = delta - grad_lse.reshape(shape);
    }
    let grad_out = problem.tile(grad_out);
    let delta = problem.tile(delta);
    let weights = output.weights.into_option();
    let weights = weights.map(|weights| Array::<B>(weights).reshape(problem.weight_rows()));

    let mut dq = problem.zeros([problem.num_q_tiles(), b * problem.head_dim]);
    let mut dk = problem.zeros([problem.num_kv_tiles(), b * problem.head_dim]);
    let mut d_bias =
        (tiles.bias.as_ref().filter(|_| wanted.bias)).map(|bias| problem.zeros(bias.shape()));
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
                // The derivative of the softcap needs the scores; weights alone are not enough.
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
        let mut dp = d_out.clone().matmul(v.transpose());
        let mut kept = p.clone();
        if let Some(factors) = problem.dropout_factors(&chunk) {
            dp = dp * &factors;
            kept = kept * factors;
        }
        let dv_rows = kept.transpose().matmul(d_out);
        let mut ds = (dp - delta) * p;
        if let Some(sums) = d_bias.take() {
            let rows = problem.bias_rows(ds.clone(), &chunk);
            d_bias = Some(problem.add_rows(sums, chunk.bias_places(&problem), rows));
        }
        if let Some(sums) = diagonals.take() {
            let rows = diagonals_of(problem.split_blocks(ds.clone(), &chunk), b);
            diagonals = Some(problem.add_rows(sums, chunk.diagonal_places(&problem), rows));
        }
        if let Some(tanh) = tanh {
            ds = ds * (-(tanh.clone() * tanh) + 1.0);
        }
        // `q` already includes the scale, `k` does not, so dQ needs it once more.
        let dq_rows = ds.clone().matmul(k) * problem.scale;
        let dk_rows = ds.transpose().matmul(q);
        dq = problem.add_rows(dq, chunk.query_tiles(&problem), dq_rows);
        dk = problem.add_rows(dk, chunk.key_tiles(&problem), dk_rows);
        dv = problem.add_rows(dv, chunk.key_tiles(&problem), dv_rows);
    }
    AttentionGrads {
        q: problem.untile_queries(dq).cast(dtype).0,
        k: problem.untile_keys(dk).cast(dtype).0,
        v: problem.untile_keys(dv).cast(dtype).0,
        scores: ScoreTensors {
            bias: (d_bias.map(|rows| problem.untile_bias(rows).cast(dtype).0)).into(),
            relative_bias: (diagonals.map(|sums| problem.distances_of(sums).0)).into(),
        },
    }
}
