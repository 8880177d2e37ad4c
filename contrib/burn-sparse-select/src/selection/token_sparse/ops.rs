//! Backend trait of attention over index lists, its values, and a reference over single keys in Burn's operations. The reference multiplies some queries at a
//! time with all keys and gives weight 0 to keys that are not listed. It takes the time of dense attention and the memory of one such part.

// Without autodiff or a backend the backward pass is unused. The enums own their tensors, also those that the macro generates, so their variants differ in
// size.
#![cfg_attr(not(feature = "autodiff"), allow(dead_code))]
#![allow(clippy::large_enum_variant)]

use std::ops::Range;

use burn::backend::{ExtensionType, get_device_settings};
use burn::tensor::IndexingUpdateOp;

use crate::selection::parts::{NOTHING, in_steps};
use burn_blocksparse::internal::prelude::*;
use burn_blocksparse::internal::values::{LayoutTensors, OutputGrads};

/// Upper bound of the scores in memory at a time. A single query may exceed it.
const SLAB_SCORES: usize = 1 << 22;

/// Kind of list entries, with the sizes that no shape contains.
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
        /// Number of keys of a block.
        block: usize,
        /// Number of places of a tile of packed queries.
        tile: usize,
    },
}

/// Parameters of a call over lists.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct TokenSparseCall {
    /// Kind of the lists.
    pub sparsity: Sparsity,
    /// Factor of the dot products.
    pub scale: f64,
    /// Expected overlap of the lists of adjacent queries, from 0 to 1.
    pub overlap: f64,
    /// True to use the kernels that gather by the lists.
    pub dispatch: bool,
}

/// Lists of queries: i32, per KV head, on the device.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub enum QueryLists<B: Backend> {
    /// Keys that each query sees: `[batch, kv_heads, seq_q, most]`, ascending and unique, then −1.
    Tokens(IntTensor<B>),
    /// Blocks that each query sees entirely, in addition to a layout. Only kernels compute them, where a plan of kernels exists; elsewhere the caller composes
    /// the result from other operations.
    Blocks(#[extension_type] BlockLists<B>),
}

op_values! {
    /// Lists of blocks by query and by block, see [`SelectedBlocks`](crate::selection::SelectedBlocks).
    pub struct BlockLists {
        /// Blocks of each query: `[batch, kv_heads, seq_q, most]`, negative for empty entries.
        pub blocks: IntTensor,
        /// Query at each place: `[batch, kv_heads, places]`.
        pub queries: IntTensor,
        /// Block of each tile of places: `[batch, kv_heads, tiles]`.
        pub tile_blocks: IntTensor,
        /// Place of each selection: `[batch, kv_heads, seq_q, most]`, negative for empty entries.
        pub places: IntTensor,
        /// Layout of the pairs that queries see in addition to their lists.
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

    /// Outputs over all keys that queries see.
    pub struct TokenSparseOutput {
        /// `[batch, heads, seq_q, value_dim]`, in the inputs' dtype.
        pub out: FloatTensor,
        /// `[batch, heads, seq_q]`, in the accumulation dtype.
        pub lse: FloatTensor,
    }

    /// Tensors saved for the backward pass.
    pub struct TokenSparseSaved {
        /// Inputs of the forward pass.
        pub inputs: TokenSparseInputs,
        /// Outputs of the forward pass.
        pub output: TokenSparseOutput,
    }

    /// Gradients, each with its input's shape and dtype.
    pub struct TokenSparseGrads {
        /// `[batch, heads, seq_q, head_dim]`
        pub q: FloatTensor,
        /// `[batch, kv_heads, seq_kv, head_dim]`
        pub k: FloatTensor,
        /// `[batch, kv_heads, seq_kv, value_dim]`
        pub v: FloatTensor,
    }
}

/// Attention over lists as a backend operation. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait TokenSparseOps: Backend {
    /// Computes the forward pass.
    #[fusion(meta = meta::forward)]
    fn token_sparse_attention(
        #[extension_type] inputs: TokenSparseInputs<Self>,
        call: TokenSparseCall,
    ) -> TokenSparseOutput<Self> {
        reference_attention::<Self>(inputs, &call)
    }

    /// Computes the backward pass. `grads` are the gradients of a loss with respect to the outputs.
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

/// Tensors of a call in the accumulation dtype.
struct Problem<B: Backend> {
    k: Array<B>,
    v: Array<B>,
    keys: IntTensor<B>,
    /// Number of query heads per KV head.
    group: usize,
    scale: f64,
}

impl<B: Backend> Problem<B> {
    /// Returns the problem of a call, and its queries.
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

    /// Reshapes queries of `[batch, heads, seq_q, width]` to rows of their KV heads: `[batch, kv_heads, group · queries, width]`.
    fn rows(&self, x: &Array<B>, queries: &Range<usize>) -> Array<B> {
        let [batch, heads, _, width] = x.dims();
        let dims = [batch, heads / self.group, self.group * queries.len(), width];
        x.clone().narrow(2, queries.clone()).reshape(dims)
    }

    /// Inverts [`rows`](Self::rows).
    fn heads(&self, rows: Array<B>) -> Array<B> {
        let [batch, kv_heads, count, width] = rows.dims();
        rows.reshape([batch, kv_heads * self.group, count / self.group, width])
    }

    /// Returns true for pairs of a range of queries that are not listed: `[batch, kv_heads, group · queries, seq_kv]`.
    fn hidden(&self, queries: &Range<usize>) -> BoolTensor<B> {
        let device = self.keys.device();
        let bools = get_device_settings::<B>(&device).bool_dtype;
        let [_, _, seq_kv, _] = self.k.dims::<4>();
        let at = [Slice::full(), Slice::full(), queries.clone().into()];
        let keys = B::int_slice(self.keys.clone(), &at);
        let none = B::int_lower_elem(keys.clone(), 0i64.into(), bools);
        // Empty entries mark an extra last column, which is dropped.
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
