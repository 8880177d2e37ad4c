//! Attention over lists of single keys in Burn's primitives: products with all keys, some queries at a time, of which those that are not listed have no
//! weight. It takes the time of dense attention, and the memory of one such part.

// Without autodiff and without a backend nobody goes backward.
#![cfg_attr(not(feature = "autodiff"), allow(dead_code))]

use std::ops::Range;

use burn::backend::get_device_settings;
use burn::tensor::{IndexingUpdateOp, IntDType};

use crate::selection::parts::in_steps;
use crate::selection::token_sparse::values::{
    QueryLists, TokenSparseCall, TokenSparseGrads, TokenSparseInputs, TokenSparseOutput,
    TokenSparseSaved,
};
use crate::selection::values::UniqueKeys;
use burn_blocksparse::internal::host;
use burn_blocksparse::internal::prelude::*;
use burn_blocksparse::internal::values::OutputGrads;

/// Scores in memory at a time, at most, unless a single query has more.
const SLAB_SCORES: usize = 1 << 22;

/// Scores of keys that a query does not see: far below any other, but finite.
const LOW: f64 = -1e30;

/// A call, in the dtype of its sums.
struct Problem<B: Backend> {
    k: Array<B>,
    v: Array<B>,
    keys: IntTensor<B>,
    /// Heads of queries of a head of keys.
    group: usize,
    scale: f64,
}

impl<B: Backend> Problem<B> {
    /// The call, and its queries.
    fn new(inputs: TokenSparseInputs<B>, call: &TokenSparseCall) -> (Self, Array<B>) {
        let dtype = accumulate_in(inputs.q.dtype().into());
        let QueryLists::Tokens(keys) = inputs.lists else {
            unreachable!("blocks are read in kernels only where a plan of kernels says so")
        };
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(|x| Array::<B>(x).cast(dtype));
        let ([_, heads, ..], [_, kv_heads, ..]) = (q.dims::<4>(), k.dims::<4>());
        let problem = Self {
            k,
            v,
            keys,
            group: heads / kv_heads,
            scale: call.scale,
        };
        (problem, q)
    }

    fn slabs(&self, seq_q: usize) -> impl Iterator<Item = Range<usize>> {
        let [batch, kv_heads, seq_kv, _] = self.k.dims();
        let of_query = batch * kv_heads * self.group * seq_kv;
        in_steps(0..seq_q, (SLAB_SCORES / of_query.max(1)).max(1))
    }

    /// Queries of `[batch, heads, seq_q, width]` as rows of their heads of keys: `[batch, kv_heads, group · queries, width]`.
    fn rows(&self, x: &Array<B>, queries: &Range<usize>) -> Array<B> {
        let [batch, heads, _, width] = x.dims();
        let dims = [batch, heads / self.group, self.group * queries.len(), width];
        x.clone().narrow(2, queries.clone()).reshape(dims)
    }

    /// The way back.
    fn heads(&self, rows: Array<B>) -> Array<B> {
        let [batch, kv_heads, count, width] = rows.dims();
        rows.reshape([batch, kv_heads * self.group, count / self.group, width])
    }

    /// Which pairs of some queries are not listed: `[batch, kv_heads, group · queries, seq_kv]`.
    fn hidden(&self, queries: &Range<usize>) -> BoolTensor<B> {
        let device = self.keys.device();
        let bools = get_device_settings::<B>(&device).bool_dtype;
        let [_, _, seq_kv, _] = self.k.dims::<4>();
        let at = [Slice::full(), Slice::full(), queries.clone().into()];
        let keys = B::int_slice(self.keys.clone(), &at);
        let none = B::int_lower_elem(keys.clone(), 0i64.into(), bools);
        // No key is that of a column after all others.
        let keys = B::int_mask_fill(keys, none, (seq_kv as i64).into());
        let [batch, lists, count, most] = keys.shape().dims();
        let zeros =
            |width| Array::<B>::zeros([batch, lists, count, width], &device, self.k.dtype());
        let (marks, ones) = (zeros(seq_kv + 1).0, (zeros(most) + 1.0).0);
        let marks = B::float_scatter(3, marks, keys, ones, IndexingUpdateOp::Add);
        let hidden = Array::<B>(marks).narrow(3, 0..seq_kv).at_most(0.5);
        let hidden = B::bool_reshape(hidden, Shape::new([batch, lists, 1, count, seq_kv]));
        let dims = [batch, lists, self.group, count, seq_kv];
        let rows = [batch, lists, self.group * count, seq_kv];
        B::bool_reshape(B::bool_expand(hidden, Shape::new(dims)), Shape::new(rows))
    }

    fn scores(&self, q: Array<B>) -> Array<B> {
        (q * self.scale).matmul(self.k.clone().transpose())
    }
}

pub(crate) fn forward<B: Backend>(
    inputs: TokenSparseInputs<B>,
    call: &TokenSparseCall,
) -> TokenSparseOutput<B> {
    let dtype = inputs.q.dtype().into();
    let (problem, q) = Problem::new(inputs, call);
    let [batch, heads, seq_q, _] = q.dims();
    let (mut outs, mut logs) = (Vec::new(), Vec::new());
    for queries in problem.slabs(seq_q) {
        let hidden = problem.hidden(&queries);
        let scores = problem.scores(problem.rows(&q, &queries));
        let scores = scores.fill(hidden.clone(), LOW);
        let max = scores.clone().max_dim(3);
        let empty = max.at_most(LOW / 2.0);
        let weights = (scores - &max).exp().fill(hidden, 0.0);
        let total = weights.clone().sum_dim(3).fill(empty.clone(), 1.0);
        outs.push(problem.heads(weights.matmul(problem.v.clone()) / &total));
        let log = (max + total.log()).fill(empty, f64::NEG_INFINITY);
        logs.push(problem.heads(log));
    }
    TokenSparseOutput {
        out: Array::cat(outs, 2).cast(dtype).0,
        lse: Array::cat(logs, 2).reshape([batch, heads, seq_q]).0,
    }
}

pub(crate) fn backward<B: Backend>(
    saved: TokenSparseSaved<B>,
    grads: OutputGrads<B>,
    call: &TokenSparseCall,
) -> TokenSparseGrads<B> {
    let TokenSparseSaved { inputs, output } = saved;
    let dtype = inputs.q.dtype().into();
    let (problem, q) = Problem::new(inputs, call);
    let [batch, heads, seq_q, _] = q.dims();
    let of_rows = [batch, heads, seq_q, 1];
    let sums = q.dtype();
    let [grad_out, out, lse] =
        [grads.out, output.out, output.lse].map(|x| Array::<B>(x).cast(sums));
    let lse = lse.reshape(of_rows);
    let delta = (out * &grad_out).sum_dim(3);
    let delta = match grads.lse.into_option() {
        Some(grad) => delta - Array::<B>(grad).cast(sums).reshape(of_rows),
        None => delta,
    };
    let [mut dk, mut dv] =
        [&problem.k, &problem.v].map(|x| Array::<B>::zeros(x.shape(), &x.0.device(), sums));
    let mut dqs = Vec::new();
    for queries in problem.slabs(seq_q) {
        let hidden = problem.hidden(&queries);
        let [q, grad, lse, delta] =
            [&q, &grad_out, &lse, &delta].map(|x| problem.rows(x, &queries));
        let weights = (problem.scores(q.clone()) - lse).exp().fill(hidden, 0.0);
        dv = dv + weights.clone().transpose().matmul(grad.clone());
        let by_weight = grad.matmul(problem.v.clone().transpose());
        let by_score = weights * (by_weight - delta) * problem.scale;
        dk = dk + by_score.clone().transpose().matmul(q);
        dqs.push(problem.heads(by_score.matmul(problem.k.clone())));
    }
    let [q, k, v] = [Array::cat(dqs, 2), dk, dv].map(|x| x.cast(dtype).0);
    TokenSparseGrads { q, k, v }
}

/// The keys that queries may see, each once, ascending: on the host, which for CPUs is where lists are.
pub(crate) fn unique_keys<B: Backend>(keys: IntTensor<B>, call: &UniqueKeys) -> IntTensor<B> {
    let device = keys.device();
    let dims @ [_, _, seq_q, most] = keys.shape().dims();
    let mut keys: Vec<i32> = host::ints::<B, _>(keys);
    for (row, list) in keys.chunks_mut(most).enumerate() {
        let seen = call.seen(row % seq_q, seq_q);
        let mut found: Vec<i32> = (list.iter().copied())
            .filter(|&key| key >= 0 && (key as usize) < seen)
            .collect();
        found.sort_unstable();
        found.dedup();
        found.resize(most, -1);
        list.copy_from_slice(&found);
    }
    let keys = B::int_from_data(TensorData::new(keys, Shape::new(dims)), &device);
    B::int_cast(keys, IntDType::I32)
}
