//! Chooses keys by content with scores of your own: a block of keys is worth as much as its best key. The built-in `topk` takes
//! the mean of the keys, in which opposite keys cancel out.
//!
//! ```sh
//! cargo run -p burn-sparse-select --example selection
//! ```

use std::error::Error;

use burn::tensor::{Device, Distribution, Tensor};
use burn_blocksparse::{
    AttentionOptions, DeviceLayout, LayoutShape, Pattern, SparseAttentionCall, sparse_attention,
};
use burn_sparse_select::{TopKOptions, recall, top_k_blocks_on_device};

const HEADS: usize = 2;
const SEQ: usize = 512;
const HEAD_DIM: usize = 32;
const BLOCK: usize = 32;

/// For each block of queries and of keys the largest `mean(q) · k`: `[batch, heads, q_blocks, kv_blocks]`.
fn best_key_scores(q: &Tensor<4>, k: &Tensor<4>) -> Tensor<4> {
    let (blocks, [batch, ..]) = (SEQ / BLOCK, q.dims());
    let q = q.clone().reshape([batch, HEADS, blocks, BLOCK, HEAD_DIM]);
    let q = q.mean_dim(3).squeeze_dim::<4>(3);
    let products = q.matmul(k.clone().transpose());
    let products = products.reshape([batch, HEADS, blocks, blocks, BLOCK]);
    products.max_dim(4).squeeze_dim(4)
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::flex();
    device.seed(1);
    let [q, k, v] = [(); 3].map(|_| {
        let shape = [1, HEADS, SEQ, HEAD_DIM];
        Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), &device)
    });
    // All queries look for one direction. Two keys point there, and beside each of them a key points the other way.
    let q = q + 1.0;
    let k = [100, 200].into_iter().fold(k, |k, position| {
        let pair = Tensor::<1>::from_floats([2.0, -2.0], &device).reshape([1, 1, 2, 1]);
        let places = [0..1, 0..HEADS, position..position + 2, 0..HEAD_DIM];
        k.slice_assign(places, pair.expand([1, HEADS, 2, HEAD_DIM]))
    });

    // 5 blocks for each block of queries: the first, its own, the one before, and the two that score highest.
    let options = TopKOptions::new(BLOCK, 5);
    let shape = LayoutShape::square(HEADS, SEQ, BLOCK);
    let by_best = DeviceLayout::from_block_scores(best_key_scores(&q, &k), shape, options.clone())?;
    let by_mean = top_k_blocks_on_device(q.clone(), k.clone(), options)?;

    // What the choices keep of the attention to all earlier keys.
    let causal = Pattern::causal().layout(HEADS, SEQ, BLOCK)?;
    let call = SparseAttentionCall::new(q.clone(), k.clone(), v.clone(), &causal);
    let (full, lse) = call.run_with_lse()?;
    println!("chosen by  blocks  attention kept  largest error");
    let mut kept_by = Vec::new();
    for (name, layout) in [("mean", &by_mean), ("best key", &by_best)] {
        let options = AttentionOptions::default();
        let kept = recall(q.clone(), k.clone(), lse.clone(), layout, options)?;
        let kept: f32 = kept.mean().into_scalar();
        let density: f32 = layout.density()?.into_scalar();
        let out = sparse_attention(q.clone(), k.clone(), v.clone(), layout)?;
        let error: f32 = (out - full.clone()).abs().max().into_scalar();
        let (kept_share, density) = (100.0 * kept, 100.0 * density);
        println!("{name:<9}  {density:>5.1}%  {kept_share:>13.1}%  {error:>13.3}");
        kept_by.push(kept);
    }
    assert!(kept_by[1] > 0.9 && kept_by[1] > kept_by[0] + 0.2);
    println!("\nhead 0 by its best keys:\n{}", by_best.to_host()?);
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
