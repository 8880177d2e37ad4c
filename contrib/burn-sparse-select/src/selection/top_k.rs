//! Layouts of the key blocks whose means score highest.

use blocksparse::{BlockLayout, LayoutShape};
use burn::tensor::Tensor;

#[cfg(feature = "cube")]
use crate::selection::estimate_ops::ScoredBy;
#[cfg(feature = "cube")]
use crate::selection::{EstimateInputs, scores_by_kernels};
use crate::selection::{check_shapes, means, products};
use burn_blocksparse::internal::device::served;
use burn_blocksparse::internal::{checked, choose_rows, mask};
use burn_blocksparse::layout::TopKOptions;
use burn_blocksparse::{DeviceLayout, OpError};

/// Returns a layout per batch entry and head with the highest-scoring key blocks of each row of query blocks. The score of a pair of blocks is
/// `mean(q) · mean(k)`, as in the block-sparse heads of MInference (Jiang et al., 2024). Ties go to the earlier block.
///
/// The scores, `batch · heads · q_blocks · kv_blocks` elements, are **read back to the host**, which waits for the device, and the layout is built there. Call
/// this once per sequence or per several steps, not per layer and step; [`top_k_blocks_on_device`] does not wait. The selection is not differentiable;
/// attention over the layout is.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::sparse_attention;
/// use burn_sparse_select::{TopKOptions, top_k_blocks};
///
/// let [q, k, v] = [(); 3]
///     .map(|_| Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &Device::flex()));
/// let layout = top_k_blocks(q.clone(), k.clone(), TopKOptions::new(32, 4))?;
/// let out = sparse_attention(q, k, v, &layout)?;
/// # assert_eq!(out.dims(), [1, 2, 256, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `q`: `[batch, heads, seq_q, head_dim]`
/// - `k`: `[batch, kv_heads, seq_kv, head_dim]`; `kv_heads` divides `heads`
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not match, an option is out of range, or the scores cannot be read.
pub fn top_k_blocks(
    q: Tensor<4>,
    k: Tensor<4>,
    options: TopKOptions,
) -> Result<BlockLayout, OpError> {
    check(&q, &k, &options)?;
    let shape = checked_shape(&q, &k, &options)?;
    let ([batch, heads, ..], kv_heads) = (q.dims(), k.dims()[1]);
    let scores = scores(q, k, heads / kv_heads, &options);
    let q_blocks = scores.dims()[2];
    let rows = choose_rows(scores, shape, &options.rule(), options.causal, None)?;
    let layouts = (0..batch).map(|entry| {
        BlockLayout::from_block_fn("top_k", shape, |head, q_block, kv_block| {
            let row = (entry * heads + head) * q_blocks + q_block;
            rows[row][kv_block].then(|| mask(q_block, kv_block, shape, options.causal))
        })
    });
    let layouts = layouts.collect::<Result<Vec<_>, _>>()?;
    Ok(BlockLayout::stack_batch(&layouts)?)
}

/// Returns the layout of [`top_k_blocks`], built on the device. Nothing is read back, so every layer and step may select anew. Both keep the earlier blocks
/// where scores are equal.
///
/// # Training
/// Gradients of attention reach q, k and v through the pairs of the selected blocks, as with any layout. The selection and its scores get none. This is plain
/// straight-through training: selected blocks learn from how well they serve. To let other blocks learn too, add a term whose value is 0 and whose gradient is
/// that of coarse attention to the block means, which determine the selection:
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{BlockLayout, LayoutShape, Pattern, sparse_attention};
/// use burn_sparse_select::{TopKOptions, top_k_blocks_on_device};
///
/// const B: usize = 32;
/// let device = Device::flex().autodiff();
/// let [q, k, v] = [(); 3].map(|_| {
///     Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &device).require_grad()
/// });
/// let layout = top_k_blocks_on_device(q.clone(), k.clone(), TopKOptions::new(B, 4))?;
/// let out = sparse_attention(q.clone(), k.clone(), v.clone(), &layout)?;
///
/// // 8 keys instead of 256: the means of the blocks of keys. A query sees those of the blocks that end no later than it, as
/// // the attention is causal. A pattern counts positions so that the last of 256 queries is at the last of 8 keys.
/// let means = |x: Tensor<4>| x.reshape([2, 256 / B, B, 16]).mean_dim(2).reshape([1, 2, 256 / B, 16]);
/// let ended = Pattern::from_fn("blocks that have ended", |_head, i, block| {
///     let query = i + 256 - 256 / B as i64;
///     (block + 1) * B as i64 <= query + 1
/// });
/// let shape = LayoutShape { heads: 2, seq_q: 256, seq_kv: 256 / B, block_size: 8 };
/// let ended = BlockLayout::new(&ended, shape)?;
/// let coarse = sparse_attention(q, means(k.clone()), means(v), &ended)?;
/// let trained = out.clone() + (coarse.clone() - coarse.detach());
/// assert_eq!(trained.to_data(), out.to_data());
/// let gradients = trained.powi_scalar(2).sum().backward();
/// assert_eq!(k.grad(&gradients).unwrap().dims(), [1, 2, 256, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// Those of [`top_k_blocks`].
///
/// # Errors
/// Those of [`top_k_blocks`], except for reading scores.
pub fn top_k_blocks_on_device(
    q: Tensor<4>,
    k: Tensor<4>,
    options: TopKOptions,
) -> Result<DeviceLayout, OpError> {
    served(&q.device().without_autodiff())?;
    check(&q, &k, &options)?;
    let shape = checked_shape(&q, &k, &options)?;
    let group = shape.heads / k.dims()[1];
    let scores = scores(q, k, group, &options);
    DeviceLayout::from_block_scores(scores, shape, options)
}

/// Returns the checked shape of the layout, before anything is computed with it.
fn checked_shape(
    q: &Tensor<4>,
    k: &Tensor<4>,
    options: &TopKOptions,
) -> Result<LayoutShape, OpError> {
    let [_, heads, seq_q, _] = q.dims();
    let shape = LayoutShape::new(heads, [seq_q, k.dims()[2]], options.block_size);
    checked(&shape)
}

fn check(q: &Tensor<4>, k: &Tensor<4>, options: &TopKOptions) -> Result<(), OpError> {
    check_shapes(q, k)?;
    OpError::ensure_positive("options.k", options.k)
}

/// Returns the scores, f32 `[batch, heads, q_blocks, kv_blocks]`. Unscaled: the scale does not change their order.
fn scores(q: Tensor<4>, k: Tensor<4>, group: usize, options: &TopKOptions) -> Tensor<4> {
    let (q, k, block) = (q.detach(), k.detach(), options.block_size);
    #[cfg(feature = "cube")]
    {
        let [q, k] = [&q, &k].map(|x| x.clone().without_autodiff());
        let rows = 0..q.dims()[2].div_ceil(block);
        let call = EstimateInputs::new(q, k).scale(1.0).causal(options.causal);
        if let Some(scores) = scores_by_kernels(&call, block, &rows, ScoredBy::Means) {
            return scores;
        }
    }
    products(means(q, block), means(k, block), group)
}
