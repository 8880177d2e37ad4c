//! Runs attention over a sliding window forward and backward, and compares it with dense attention under the same mask.
//!
//! ```sh
//! cargo run -p burn-blocksparse --example attention
//! ```

use std::error::Error;

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Distribution, Tensor, TensorData};
use burn_blocksparse::{Pattern, SparseAttentionCall, sparse_attention};

const HEADS: usize = 4;
const SEQ: usize = 512;
const HEAD_DIM: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    // On a GPU: `Device::cuda(0)` or `Device::wgpu(…)`, with the feature of the same name here and in `burn`.
    let device = Device::flex().autodiff();
    let [q, k, v] = [(); 3].map(|_| {
        let shape = [1, HEADS, SEQ, HEAD_DIM]; // [batch, heads, seq, head_dim]
        Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &device).require_grad()
    });

    // A query sees itself and the 63 keys before it. Build a layout once, and use it for every call of these sizes.
    let layout = Pattern::local(64).layout(HEADS, SEQ, 32)?;
    println!("{layout}");

    // Which kernels a call runs, and why not faster ones; on a CPU it is the reference implementation.
    let call = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &layout);
    println!("{}\n", call.explain()?);

    let out = sparse_attention(q.clone(), k.clone(), v.clone(), &layout)?;
    let gradients = out.clone().powi_scalar(2).mean().backward();

    // The same attention over all pairs, with those outside the window masked.
    let allowed: Vec<bool> = layout.to_dense(0).concat();
    let allowed = Tensor::<2, Bool>::from_data(TensorData::new(allowed, [SEQ, SEQ]), &device);
    let hidden = allowed.bool_not().unsqueeze::<4>();
    let scores = q.clone().matmul(k.clone().transpose()) / (HEAD_DIM as f64).sqrt();
    let hidden = hidden.expand([1, HEADS, SEQ, SEQ]);
    let dense = softmax(scores.mask_fill(hidden, f32::NEG_INFINITY), 3).matmul(v.clone());
    let dense_gradients = dense.clone().powi_scalar(2).mean().backward();

    let difference = largest_difference(out.inner(), dense.inner());
    println!("output: largest difference from dense attention {difference:.1e}");
    assert!(difference < 1e-5);
    for (name, x) in [("q", q), ("k", k), ("v", v)] {
        let of = |gradients| x.grad(gradients).expect("x is part of the loss");
        let difference = largest_difference(of(&gradients), of(&dense_gradients));
        println!("gradient of {name}: {difference:.1e}");
        assert!(difference < 1e-6);
    }
    Ok(())
}

fn largest_difference(a: Tensor<4>, b: Tensor<4>) -> f32 {
    (a - b).abs().max().into_scalar()
}

#[test]
fn it_runs() {
    main().unwrap();
}
