//! Means of clusters, and their updates.

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_blocksparse::Seed;
use burn_blocksparse::graph::ensure_not_capturing;
use burn_blocksparse::internal::sum_all;
use burn_fused_ops::embedding_backward;
use burn_sparse_select::internal::row_products;

use super::unit;
use crate::error::{Result, ensure};
use crate::in_graph::in_graph_of;
use burn_blocksparse::internal::arange;

/// Returns the similarities of `x`, `[batch, heads, length, dim]`, to means `[heads, clusters, dim]`: `[batch, heads, clusters, length]`.
pub(super) fn similarities(x: Tensor<4>, means: Tensor<3>) -> Tensor<4> {
    let [batch, heads, _, dim] = x.dims();
    let [_, clusters, _] = means.dims();
    let means = means
        .unsqueeze_dim::<4>(0)
        .expand([batch, heads, clusters, dim]);
    row_products(means, x)
}

/// Returns the most similar mean of each token, the first on ties, numbered over the means of all heads: `[batch, heads, length]`, i32.
pub(super) fn nearest(similarities: &Tensor<4>) -> Tensor<3, Int> {
    let [batch, heads, clusters, length] = similarities.dims();
    let nearest = similarities.clone().argmax(2).cast(DType::I32);
    let nearest = nearest.reshape([batch, heads, length]);
    let first = arange(heads, &similarities.device()).mul_scalar(clusters as i32);
    nearest + first.reshape([1, heads, 1]).expand([batch, heads, length])
}

/// Returns the normalised sums of the tokens nearest to each mean, over the batch: `[heads, clusters, dim]`. A mean without tokens gets zeros.
fn centres(x: Tensor<4>, nearest: Tensor<3, Int>, clusters: usize) -> Result<Tensor<3>> {
    let [batch, heads, length, dim] = x.dims();
    let rows = batch * heads * length;
    let (ids, x) = (nearest.reshape([rows]), x.reshape([rows, dim]));
    let sums = embedding_backward(ids, x, heads * clusters)?;
    Ok(unit(sums.reshape([heads, clusters, dim])))
}

/// Returns `decay · mean + (1 − decay) · centre` with the centre of the tokens nearest to each mean (Roy et al., 2021, §4.1). A mean without tokens, or whose
/// tokens sum to zero, is unchanged.
pub(super) fn followed(
    means: Tensor<3>,
    x: Tensor<4>,
    nearest: Tensor<3, Int>,
    decay: f64,
) -> Result<Tensor<3>> {
    let dims = means.dims();
    let centres = centres(x, nearest, dims[1])?;
    let none = centres.clone().abs().max_dim(2).equal_elem(0.0);
    let moved = means.clone() * decay + centres * (1.0 - decay);
    Ok(moved.mask_where(none.expand(dims), means))
}

/// Returns the mean square of the distances of `x` from their nearest means, with a gradient with respect to `x` alone: `[1]`.
pub(super) fn commitment(x: Tensor<4>, means: Tensor<3>, nearest: Tensor<3, Int>) -> Tensor<1> {
    let [batch, heads, length, dim] = x.dims();
    let [_, clusters, _] = means.dims();
    let means = means.reshape([heads * clusters, dim]);
    let own = means.select(0, nearest.reshape([batch * heads * length]));
    let own = own.reshape([batch, heads, length, dim]);
    // A constant in the graph of `x`.
    let own = in_graph_of(&x, own);
    let count = (batch * heads * length * dim) as f64;
    sum_all((x - own).powi_scalar(2)).div_scalar(count)
}

/// Runs spherical k-means from distinct random tokens, drawn for each head from the seed: `[heads, clusters, dim]`. `x` is without autodiff.
pub(super) fn settled(
    x: Tensor<4>,
    clusters: usize,
    iterations: usize,
    seed: Seed,
) -> Result<Tensor<3>> {
    ensure_not_capturing("which tokens clusters begin with")?;
    let [batch, heads, length, dim] = x.dims();
    let tokens = batch * length;
    ensure! { tokens >= clusters =>
    "x", format!("of {clusters} tokens at least, as many as clusters"), tokens; }
    let x = (x.swap_dims(0, 1)).reshape([1, heads, tokens, dim]);
    let rows = x.clone().reshape([heads * tokens, dim]);
    let mut drawn = Vec::with_capacity(heads * clusters);
    for head in 0..heads {
        let mut left: Vec<usize> = (0..tokens).collect();
        for cluster in 0..clusters {
            let number = seed.derive((head * clusters + cluster) as u64).value();
            let at = cluster + (number % (tokens - cluster) as u64) as usize;
            left.swap(cluster, at);
            drawn.push((head * tokens + left[cluster]) as i32);
        }
    }
    let drawn = TensorData::new(drawn, [heads * clusters]);
    let drawn = Tensor::<1, Int>::from_data(drawn, (&x.device(), DType::I32));
    let mut means = rows.select(0, drawn).reshape([heads, clusters, dim]);
    for _ in 0..iterations {
        let nearest = nearest(&similarities(x.clone(), means.clone()));
        means = followed(means, x.clone(), nearest, 0.0)?;
    }
    Ok(means)
}
