//! Attention as programs call it.

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_blocksparse::{Layout, SparseAttentionCall};

/// Queries, keys and values of one sequence.
pub fn inputs(
    [heads, kv_heads, dim]: [usize; 3],
    n: usize,
    options: (&Device, DType),
) -> [Tensor<4>; 3] {
    let normal = Distribution::Normal(0.0, 1.0);
    [heads, kv_heads, kv_heads].map(|heads| Tensor::random([1, heads, n, dim], normal, options))
}

pub fn run<'a>(
    q: &Tensor<4>,
    k: &Tensor<4>,
    v: &Tensor<4>,
    layout: impl Into<Layout<'a>>,
) -> Tensor<4> {
    let call = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), layout);
    call.run().expect("shapes fit").out
}
