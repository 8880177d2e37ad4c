//! Attention over lists of single keys in Burn's primitives: products with all keys, some queries at a time, of which those that are not listed have no
//! weight. It takes the time of dense attention, and the memory of one such part.

// Without autodiff and without a backend nobody goes backward.
#![cfg_attr(not(feature = "autodiff"), allow(dead_code))]

use std::ops::Range;

use burn::backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata, get_device_settings};
use burn::tensor::{FloatDType, IndexingUpdateOp, IntDType, Shape, Slice, TensorData};

use crate::selection::parts::in_steps;
use crate::selection::token_sparse::values::{
    QueryLists, TokenSparseCall, TokenSparseGrads, TokenSparseInputs, TokenSparseOutput,
    TokenSparseSaved,
};
use crate::selection::values::UniqueKeys;
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::internal::host;
use burn_blocksparse::internal::values::OutputGrads;

/// Scores in memory at a time, at most, unless a single query has more.
const SLAB_SCORES: usize = 1 << 22;

/// Scores of keys that a query does not see: far below any other, but finite.
const LOW: f64 = -1e30;

/// A call, in the dtype of its sums.
struct Problem<B: Backend> {
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    keys: IntTensor<B>,
    dtype: FloatDType,
    device: Device<B>,
    batch: usize,
    kv_heads: usize,
    /// Heads of queries of a head of keys.
    group: usize,
    seq_q: usize,
    seq_kv: usize,
    head_dim: usize,
    value_dim: usize,
    scale: f64,
}

impl<B: Backend> Problem<B> {
    /// The call, and its queries.
    fn new(inputs: TokenSparseInputs<B>, call: &TokenSparseCall) -> (Self, FloatTensor<B>) {
        let dtype = accumulate_in(inputs.q.dtype().into());
        let [batch, heads, seq_q, head_dim] = inputs.q.shape().dims();
        let [_, kv_heads, seq_kv, _] = inputs.k.shape().dims();
        let value_dim = inputs.v.shape()[3];
        let QueryLists::Tokens(keys) = inputs.lists else {
            unreachable!("blocks are read in kernels only where a plan of kernels says so")
        };
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(|x| B::float_cast(x, dtype));
        let problem = Self {
            device: q.device(),
            k,
            v,
            keys,
            dtype,
            batch,
            kv_heads,
            group: heads / kv_heads,
            seq_q,
            seq_kv,
            head_dim,
            value_dim,
            scale: call.scale,
        };
        (problem, q)
    }

    fn slabs(&self) -> Vec<Range<usize>> {
        let of_query = self.batch * self.kv_heads * self.group * self.seq_kv;
        let slab = (SLAB_SCORES / of_query.max(1)).max(1);
        in_steps(0..self.seq_q, slab).collect()
    }

    /// Queries of `[batch, heads, seq_q, width]` as rows of their heads of keys: `[batch, kv_heads, group · queries, width]`.
    fn rows(&self, x: &FloatTensor<B>, queries: &Range<usize>, width: usize) -> FloatTensor<B> {
        let at = [
            Slice::full(),
            Slice::full(),
            Slice::from(queries.clone()),
            Slice::full(),
        ];
        let rows = B::float_slice(x.clone(), &at);
        let count = self.group * queries.len();
        B::float_reshape(rows, Shape::new([self.batch, self.kv_heads, count, width]))
    }

    /// The way back.
    fn heads(&self, rows: FloatTensor<B>, queries: usize, width: usize) -> FloatTensor<B> {
        let heads = self.kv_heads * self.group;
        B::float_reshape(rows, Shape::new([self.batch, heads, queries, width]))
    }

    /// Which pairs of some queries are not listed: `[batch, kv_heads, group · queries, seq_kv]`.
    fn hidden(&self, queries: &Range<usize>) -> BoolTensor<B> {
        let bools = get_device_settings::<B>(&self.device).bool_dtype;
        let at = [
            Slice::full(),
            Slice::full(),
            Slice::from(queries.clone()),
            Slice::full(),
        ];
        let keys = B::int_slice(self.keys.clone(), &at);
        let none = B::int_lower_elem(keys.clone(), 0i64.into(), bools);
        // No key is that of a column after all others.
        let keys = B::int_mask_fill(keys, none, (self.seq_kv as i64).into());
        let [batch, lists, count, most] = keys.shape().dims();
        let zeros = |width| {
            let shape = Shape::new([batch, lists, count, width]);
            B::float_zeros(shape, &self.device, self.dtype)
        };
        let ones = B::float_add_scalar(zeros(most), 1f32.into());
        let marks = B::float_scatter(3, zeros(self.seq_kv + 1), keys, ones, IndexingUpdateOp::Add);
        let mut seen = [Slice::full(); 4];
        seen[3] = Slice::from(0..self.seq_kv);
        let marks = B::float_slice(marks, &seen);
        let hidden = B::float_lower_elem(marks, 0.5f32.into(), bools);
        let hidden = B::bool_reshape(hidden, Shape::new([batch, lists, 1, count, self.seq_kv]));
        let dims = [batch, lists, self.group, count, self.seq_kv];
        let hidden = B::bool_expand(hidden, Shape::new(dims));
        B::bool_reshape(
            hidden,
            Shape::new([batch, lists, self.group * count, self.seq_kv]),
        )
    }

    fn scores(&self, q: FloatTensor<B>) -> FloatTensor<B> {
        let q = B::float_mul_scalar(q, self.scale.into());
        B::float_matmul(q, B::float_swap_dims(self.k.clone(), 2, 3))
    }
}

pub(crate) fn forward<B: Backend>(
    inputs: TokenSparseInputs<B>,
    call: &TokenSparseCall,
) -> TokenSparseOutput<B> {
    let dtype = inputs.q.dtype();
    let (problem, q) = Problem::new(inputs, call);
    let bools = get_device_settings::<B>(&problem.device).bool_dtype;
    let (mut outs, mut logs) = (Vec::new(), Vec::new());
    for queries in problem.slabs() {
        let hidden = problem.hidden(&queries);
        let scores = problem.scores(problem.rows(&q, &queries, problem.head_dim));
        let scores = B::float_mask_fill(scores, hidden.clone(), LOW.into());
        let max = B::float_max_dim(scores.clone(), 3);
        let weights = B::float_exp(B::float_sub(scores, max.clone()));
        let weights = B::float_mask_fill(weights, hidden, 0f32.into());
        let total = B::float_sum_dim(weights.clone(), 3);
        let empty = B::float_lower_equal_elem(max.clone(), (LOW / 2.0).into(), bools);
        let total = B::float_mask_fill(total, empty.clone(), 1f32.into());
        let out = B::float_div(B::float_matmul(weights, problem.v.clone()), total.clone());
        let log = B::float_add(max, B::float_log(total));
        let log = B::float_mask_fill(log, empty, f64::NEG_INFINITY.into());
        outs.push(problem.heads(out, queries.len(), problem.value_dim));
        logs.push(problem.heads(log, queries.len(), 1));
    }
    let lse = B::float_cat(logs, 2);
    let heads = problem.kv_heads * problem.group;
    TokenSparseOutput {
        out: B::float_cast(B::float_cat(outs, 2), dtype.into()),
        lse: B::float_reshape(lse, Shape::new([problem.batch, heads, problem.seq_q])),
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
    let heads = problem.kv_heads * problem.group;
    let of_rows = Shape::new([problem.batch, heads, problem.seq_q, 1]);
    let grad_out = B::float_cast(grads.out, problem.dtype);
    let out = B::float_cast(output.out, problem.dtype);
    let lse = B::float_reshape(output.lse, of_rows.clone());
    let delta = B::float_sum_dim(B::float_mul(out, grad_out.clone()), 3);
    let delta = match grads.lse.into_option() {
        Some(grad) => {
            let grad = B::float_cast(grad, problem.dtype);
            B::float_sub(delta, B::float_reshape(grad, of_rows))
        }
        None => delta,
    };
    let zeros = |width| {
        let shape = Shape::new([problem.batch, problem.kv_heads, problem.seq_kv, width]);
        B::float_zeros(shape, &problem.device, problem.dtype)
    };
    let (mut dk, mut dv) = (zeros(problem.head_dim), zeros(problem.value_dim));
    let mut dqs = Vec::new();
    for queries in problem.slabs() {
        let hidden = problem.hidden(&queries);
        let own = problem.rows(&q, &queries, problem.head_dim);
        let own_grad = problem.rows(&grad_out, &queries, problem.value_dim);
        let log = problem.rows(&lse, &queries, 1);
        let scores = problem.scores(own.clone());
        let weights = B::float_exp(B::float_sub(scores, log));
        let weights = B::float_mask_fill(weights, hidden, 0f32.into());
        let turned = B::float_swap_dims(weights.clone(), 2, 3);
        dv = B::float_add(dv, B::float_matmul(turned, own_grad.clone()));
        let by_weight = B::float_matmul(own_grad, B::float_swap_dims(problem.v.clone(), 2, 3));
        let less = B::float_sub(by_weight, problem.rows(&delta, &queries, 1));
        let by_score = B::float_mul_scalar(B::float_mul(weights, less), problem.scale.into());
        let turned = B::float_swap_dims(by_score.clone(), 2, 3);
        dk = B::float_add(dk, B::float_matmul(turned, own));
        let dq = B::float_matmul(by_score, problem.k.clone());
        dqs.push(problem.heads(dq, queries.len(), problem.head_dim));
    }
    let [q, k, v] = [B::float_cat(dqs, 2), dk, dv].map(|x| B::float_cast(x, dtype));
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
