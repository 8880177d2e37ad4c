//! The backend trait of queries that list what they see, what crosses it, and attention over lists of single keys in Burn's primitives: products with all keys,
//! some queries at a time, of which those that are not listed have no weight. It takes the time of dense attention, and the memory of one such part.

// Without autodiff and without a backend nobody goes backward. What crosses backends holds its tensors itself, also where the macro makes it.
#![cfg_attr(not(feature = "autodiff"), allow(dead_code))]
#![allow(clippy::large_enum_variant)]

use std::ops::Range;

use burn::backend::{ExtensionType, get_device_settings};
use burn::tensor::IndexingUpdateOp;

use crate::selection::parts::{NOTHING, in_steps};
use burn_blocksparse::internal::prelude::*;
use burn_blocksparse::internal::values::{LayoutTensors, OutputGrads};

/// Scores in memory at a time, at most, unless a single query has more.
const SLAB_SCORES: usize = 1 << 22;

/// What the numbers of lists name, with the sizes that are in none of their shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sparsity {
    /// Single keys.
    Tokens {
        /// True if no query lists a key after its own position.
        causal: bool,
    },
    /// Blocks of keys.
    Blocks {
        /// Keys of a block.
        block: usize,
        /// Places of a tile of queries.
        tile: usize,
    },
}

/// Parameters of a call over lists, besides its tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct TokenSparseCall {
    /// Kind of the lists.
    pub sparsity: Sparsity,
    /// Factor of the scores.
    pub scale: f64,
    /// The share that the lists of adjacent queries are expected to have in common, from 0 to 1.
    pub overlap: f64,
    /// True if kernels gather by the lists.
    pub dispatch: bool,
}

/// Lists of queries: i32, for each head of keys, on the device.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub enum QueryLists<B: Backend> {
    /// The keys that each query sees: `[batch, kv_heads, seq_q, most]`, ascending, each once, −1 after the last.
    Tokens(IntTensor<B>),
    /// The blocks that each query sees whole beside a layout. They are computed in kernels only where a plan of kernels says so: elsewhere the same is composed of other
    /// operations.
    Blocks(#[extension_type] BlockLists<B>),
}

op_values! {
    /// Lists of blocks, by queries and by blocks, as [`SelectedBlocks`](crate::selection::SelectedBlocks) has them.
    pub struct BlockLists {
        /// The blocks of each query: `[batch, kv_heads, seq_q, most]`, negative for none.
        pub blocks: IntTensor,
        /// The query at each place: `[batch, kv_heads, places]`,
        pub queries: IntTensor,
        /// and the block of each tile of places: `[batch, kv_heads, tiles]`.
        pub tile_blocks: IntTensor,
        /// The place of each choice: `[batch, kv_heads, seq_q, most]`, negative for none.
        pub places: IntTensor,
        /// Layout of what queries see in addition to their lists.
        pub near: LayoutTensors,
    }

    /// Inputs of attention over lists.
    pub struct TokenSparseInputs {
        /// `[batch, heads, seq_q, head_dim]`
        pub q: FloatTensor,
        /// `[batch, kv_heads, seq_kv, head_dim]`
        pub k: FloatTensor,
        /// `[batch, kv_heads, seq_kv, value_dim]`
        pub v: FloatTensor,
        /// Lists of the queries.
        pub lists: QueryLists,
    }

    /// Out and lse, over all keys that queries see.
    pub struct TokenSparseOutput {
        /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
        pub out: FloatTensor,
        /// `[batch, heads, seq_q]`, in the dtype of sums.
        pub lse: FloatTensor,
    }

    /// Tensors saved for the backward pass.
    pub struct TokenSparseSaved {
        /// Its inputs.
        pub inputs: TokenSparseInputs,
        /// Its output.
        pub output: TokenSparseOutput,
    }

    /// Gradients, each of its input's shape and dtype.
    pub struct TokenSparseGrads {
        /// `[batch, heads, seq_q, head_dim]`
        pub q: FloatTensor,
        /// `[batch, kv_heads, seq_kv, head_dim]`
        pub k: FloatTensor,
        /// `[batch, kv_heads, seq_kv, value_dim]`
        pub v: FloatTensor,
    }
}

/// Attention over lists as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait TokenSparseOps: Backend {
    /// The forward pass.
    #[fusion(meta = meta::forward)]
    fn token_sparse_attention(
        #[extension_type] inputs: TokenSparseInputs<Self>,
        call: TokenSparseCall,
    ) -> TokenSparseOutput<Self> {
        reference_attention::<Self>(inputs, &call)
    }

    /// The backward pass: gradients of a loss whose gradients with respect to the outputs are `grads`.
    #[fusion(meta = meta::backward)]
    fn token_sparse_attention_backward(
        #[extension_type] saved: TokenSparseSaved<Self>,
        #[extension_type] grads: OutputGrads<Self>,
        call: TokenSparseCall,
    ) -> TokenSparseGrads<Self> {
        reference_gradients::<Self>(saved, grads, &call)
    }
}

reference_backends!(TokenSparseOps);

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

pub(crate) fn reference_attention<B: Backend>(
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
        let scores = scores.fill(hidden.clone(), NOTHING);
        let max = scores.clone().max_dim(3);
        let empty = max.at_most(NOTHING / 2.0);
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

pub(crate) fn reference_gradients<B: Backend>(
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

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use burn_blocksparse::internal::values::OutputGradsMetadata;

    pub fn forward(
        inputs: &TokenSparseInputsMetadata,
        _call: &TokenSparseCall,
    ) -> TokenSparseOutputMetadata {
        let [batch, heads, seq_q, _] = inputs.q.shape.dims::<4>();
        let value_dim = inputs.v.shape[3];
        let sums = accumulate_in(inputs.q.dtype.into()).into();
        TokenSparseOutputMetadata {
            out: TensorSpec::new([batch, heads, seq_q, value_dim].into(), inputs.q.dtype),
            lse: TensorSpec::new([batch, heads, seq_q].into(), sums),
        }
    }

    pub fn backward(
        saved: &TokenSparseSavedMetadata,
        _grads: &OutputGradsMetadata,
        _call: &TokenSparseCall,
    ) -> TokenSparseGradsMetadata {
        TokenSparseGradsMetadata {
            q: saved.inputs.q.clone(),
            k: saved.inputs.k.clone(),
            v: saved.inputs.v.clone(),
        }
    }
}
