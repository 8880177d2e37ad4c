//! Burn's own attention function, with its arguments converted to a layout and a bias.

use std::sync::Arc;

use blocksparse::internal::Recent;
use blocksparse::{BlockLayout, BlockMask, LayoutError, LayoutShape, Pattern};
use burn::backend::get_or_init_device_settings;
use burn::tensor::Bool;
use burn::tensor::ops::AttentionModuleOptions;

use crate::attention::SparseAttentionCall;
use crate::base::prelude::*;
use crate::check;
use crate::options::AttentionOptions;

/// Block size of the layouts that are built here.
pub(crate) const BLOCK: usize = 64;

/// Cached layouts without masks. A program uses few lengths.
static LAYOUTS: Recent<(LayoutShape, Pattern), BlockLayout> = Recent::new(16);

/// Cached layouts of masks. A model has few masks, which many layers share.
static MASKS: Recent<Arc<MaskKey>, BlockLayout> = Recent::new(4);

/// Computes [`burn::tensor::module::attention`] with a fused backward pass, on every backend. Changing the `use` line is enough.
///
/// Computes `softmax(softcap(scale · q · kᵀ), masked, + attn_bias) · v` like Burn, with scale, softcap, mask (`true` is masked out), causality (aligned
/// bottom-right, so the last query sees all keys) and bias. Rows in which everything is masked, by `mask`, by −∞ in `attn_bias` or because causality leaves no
/// key (`seq_q > seq_kv`), give zeros and zero gradients.
///
/// ```
/// use burn::tensor::ops::AttentionModuleOptions;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::module::attention; // was burn::tensor::module::attention
///
/// let device = Device::flex().autodiff();
/// let q = Tensor::<4>::random([1, 2, 100, 16], Distribution::Default, &device).require_grad();
/// let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: true };
/// let out = attention(q.clone(), q.clone(), q.clone(), None, None, options);
/// assert_eq!(q.grad(&out.sum().backward()).unwrap().dims(), [1, 2, 100, 16]);
/// ```
///
/// # Shapes
/// - `query`: `[batch, heads, seq_q, head_dim]`
/// - `key`: `[batch, kv_heads, seq_kv, head_dim]`; unlike Burn's, `kv_heads` may be any divisor of `heads`
/// - `value`: `[batch, kv_heads, seq_kv, value_dim]`
/// - `mask`: `[batch or 1, heads or 1, seq_q or 1, seq_kv or 1]`
/// - `attn_bias`: the same, in the dtype of `query`
/// - returns `[batch, heads, seq_q, value_dim]`
///
/// # Memory
/// The backward pass stores query, key, value, the output and two numbers per row. Burn's stores several tensors `[batch, heads, seq_q, seq_kv]`. A bias needs
/// memory for a copy of itself, not for its broadcast.
///
/// # Masks
/// A mask that all queries share, `[.., 1, seq_kv]`, such as a padding mask, stays on its device. Any other mask is read by every call, which waits for the
/// device, and becomes a layout that omits blocks without a pair. The layouts of the last 4 distinct masks are cached. [`mask_layout`] reads a mask once for
/// many calls of [`SparseAttentionCall`]. For masks that depend on positions a [`Pattern`] is cheapest.
///
/// # Biases
/// Values below −1e8 (−6e4 in f16) are raised to it. A row whose scores are all below half of it counts as masked.
///
/// # Panics
/// If [`try_attention`] returns an error, with its message.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Tensor<4> {
    try_attention(query, key, value, mask, attn_bias, options)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Computes [`attention`] and returns errors instead of panicking.
///
/// # Errors
/// As [`sparse_attention`](crate::sparse_attention); also if a length is 0, if the mask or the bias does not fit, or if the mask cannot be read.
pub fn try_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mut mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Result<Tensor<4>, OpError> {
    check::tensors(&query, &key, &value)?;
    let [batch, heads, seq_q, _] = query.dims();
    let seq_kv = key.dims()[2];
    let pairs = [batch, heads, seq_q, seq_kv];
    let (device, dtype) = (query.device(), query.dtype());
    let same_device =
        |argument, got: Device| OpError::expect_same(argument, device.clone(), "query's", got);
    if let Some(mask) = &mask {
        fits(MASK, mask.dims(), pairs)?;
        same_device("mask's device", mask.device())?;
    }
    if let Some(bias) = &attn_bias {
        fits(BIAS, bias.dims(), pairs)?;
        OpError::expect_same("attn_bias's dtype", dtype, "query's", bias.dtype())?;
        same_device("attn_bias's device", bias.device())?;
    }
    let shape = LayoutShape::new(heads, [seq_q, seq_kv], BLOCK);
    shape.validate()?;

    // A mask of keys becomes a bias, unless that would expand a smaller one to all pairs.
    let given = attn_bias.as_ref().map_or([1; 4], Tensor::dims);
    let of_keys = mask.take_if(|mask| {
        let larger = (0..2).any(|dim| mask.dims()[dim] > given[dim]);
        mask.dims()[2] == 1 && (given[2] == 1 || !larger)
    });
    let bias = masked_bias::<Dispatch>(
        attn_bias.map(Tensor::into_dispatch),
        of_keys.map(Tensor::into_dispatch),
        seq_kv,
        (device.as_dispatch(), dtype),
    );

    let causal = options.is_causal;
    let layout = match mask {
        Some(mask) => mask_layout(mask, heads, [seq_q, seq_kv], causal)?,
        None if causal => pattern_layout(Pattern::causal(), shape)?,
        None => pattern_layout(Pattern::dense(), shape)?,
    };
    let call = SparseAttentionCall::new(query, key, value, &layout).options(AttentionOptions {
        scale: options.scale,
        softcap: options.softcap,
        ..AttentionOptions::default()
    });
    let Some(bias) = bias else {
        return Ok(call.run()?.out);
    };
    let call = call.bias(Tensor::from_dispatch(bias));
    let (out, lse) = call.run_with_lse()?;
    let (out, lse) = (out.into_dispatch(), lse.into_dispatch());
    let out = without_masked_rows::<Dispatch>(out, lse);
    Ok(Tensor::from_dispatch(out))
}

/// Returns the layout of exactly the pairs that a mask of Burn's [`attention`] leaves, restricted to causal pairs if `causal`. It reads the mask from its
/// device and waits for all pending work there. The layout can be reused for any number of calls of [`SparseAttentionCall`].
///
/// ```
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_blocksparse::module::mask_layout;
///
/// // The first key is masked out for all.
/// let mask = Tensor::<4, Bool>::from_data([[[[true, false, false]]]], &Device::flex());
/// let layout = mask_layout(mask, 2, [3, 3], true)?;
/// assert_eq!(layout.to_dense(0)[1], [false, true, false]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// `mask`: `[batch or 1, heads or 1, seq_q or 1, seq_kv or 1]`, `true` is masked out; `lengths`: `[seq_q, seq_kv]`. If the mask has several batch entries, the
/// layout is per batch.
///
/// # Errors
/// [`OpError`] if the mask does not fit `heads` and `lengths`, if a size is out of range, or if the mask cannot be read.
pub fn mask_layout(
    mask: Tensor<4, Bool>,
    heads: usize,
    lengths: [usize; 2],
    causal: bool,
) -> Result<BlockLayout, OpError> {
    let dims = mask.dims();
    let [entries, _, _, _] = dims;
    OpError::ensure_positive("mask's batch", entries)?;
    fits(MASK, dims, [entries, heads, lengths[0], lengths[1]])?;
    let shape = LayoutShape::new(heads, lengths, BLOCK);
    shape.validate()?;
    let masked = mask.try_into_data().map_err(OpError::read)?;
    let key = Arc::new(MaskKey {
        shape,
        causal,
        dims,
        masked: masked.iter::<bool>().collect(),
    });
    MASKS.get_or_try_make(key.clone(), || key.layout())
}

/// Returns the bias of a masked pair. Kernels accept only finite biases.
fn masked_score(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => -6e4,
        _ => -1e8,
    }
}

/// Returns the bias of a call in the broadcast shape of bias and mask. Masked pairs and smaller values are set to [`masked_score`]. `None` if there is neither.
pub(crate) fn masked_bias<B: Backend>(
    bias: Option<FloatTensor<B>>,
    mask: Option<BoolTensor<B>>,
    seq_kv: usize,
    (device, dtype): (&B::Device, DType),
) -> Option<FloatTensor<B>> {
    let of_bias = bias.as_ref().map_or([1; 4], |bias| bias.shape().dims());
    let of_mask = mask.as_ref().map_or([1; 4], |mask| mask.shape().dims());
    let mut dims = [0, 1, 2, 3].map(|dim| of_bias[dim].max(of_mask[dim]));
    // A bias with one element for all keys of a row is expanded, since kernels need one per key.
    dims[3] = seq_kv;
    let (shape, masked) = (Shape::new(dims), masked_score(dtype));
    let bias = bias.map(|bias| {
        let bias = B::float_clamp_min(bias, masked.into());
        B::float_expand(bias, shape.clone())
    });
    let Some(mask) = mask else {
        return bias;
    };
    let zeros = || B::float_zeros(shape.clone(), device, dtype.into());
    let bias = bias.unwrap_or_else(zeros);
    let mask = B::bool_expand(mask, shape.clone());
    Some(B::float_mask_fill(bias, mask, masked.into()))
}

/// Zeroes rows whose scores are all masked.
pub(crate) fn without_masked_rows<B: Backend>(
    out: FloatTensor<B>,
    lse: FloatTensor<B>,
) -> FloatTensor<B> {
    let shape = out.shape();
    let [batch, heads, rows, _] = shape.dims();
    let bools = get_or_init_device_settings::<B>(&out.device()).bool_dtype;
    let bound = masked_score(out.dtype()) / 2.0;
    let empty = B::float_lower_elem(lse, bound.into(), bools);
    let empty = B::bool_reshape(empty, Shape::new([batch, heads, rows, 1]));
    B::float_mask_fill(out, B::bool_expand(empty, shape), 0.0.into())
}

pub(crate) fn pattern_layout(pattern: Pattern, shape: LayoutShape) -> Result<BlockLayout, OpError> {
    let key = (shape, pattern.clone());
    LAYOUTS.get_or_try_make(key, || Ok(BlockLayout::new(&pattern, shape)?))
}

/// Names of a mask's and a bias's dimensions in errors.
const MASK: [&str; 4] = [
    "mask's batch",
    "mask's heads",
    "mask's seq_q",
    "mask's seq_kv",
];
const BIAS: [&str; 4] = [
    "attn_bias's batch",
    "attn_bias's heads",
    "attn_bias's seq_q",
    "attn_bias's seq_kv",
];

/// Checks that dimensions can be broadcast to those of all pairs.
fn fits(names: [&'static str; 4], dims: [usize; 4], pairs: [usize; 4]) -> Result<(), OpError> {
    for ((argument, got), expected) in names.into_iter().zip(dims).zip(pairs) {
        blocksparse::ensure! { OpError; got == 1 || got == expected => argument, format!("{expected} or 1"), got; }
    }
    Ok(())
}

/// The cache key of a mask's layout.
#[derive(PartialEq)]
struct MaskKey {
    shape: LayoutShape,
    causal: bool,
    dims: [usize; 4],
    masked: Vec<bool>,
}

impl MaskKey {
    fn layout(&self) -> Result<BlockLayout, OpError> {
        let [entries, mask_heads, rows, columns] = self.dims;
        let LayoutShape {
            heads,
            seq_q,
            seq_kv,
            ..
        } = self.shape;
        let allows = |entry: usize, head: usize, row: usize, column: usize| {
            let line = (entry * mask_heads + head) * rows + row.min(rows - 1);
            let seen = !self.causal || column + seq_q <= row + seq_kv;
            seen && !self.masked[line * columns + column.min(columns - 1)]
        };
        // Heads that share a mask are evaluated once.
        let shape_of_mask = LayoutShape {
            heads: mask_heads,
            ..self.shape
        };
        let layouts = (0..entries).map(|entry| {
            let layout =
                BlockLayout::from_block_fn("mask", shape_of_mask, |head, q_block, kv_block| {
                    Some(BlockMask::from_fn(BLOCK, |r, c| {
                        let (row, column) = (q_block * BLOCK + r, kv_block * BLOCK + c);
                        row < seq_q && column < seq_kv && allows(entry, head, row, column)
                    }))
                })?;
            match mask_heads == heads {
                true => Ok(layout),
                false => layout.of_first_head(heads),
            }
        });
        let layouts = layouts.collect::<Result<Vec<_>, LayoutError>>()?;
        Ok(match &layouts[..] {
            [one] => one.clone(),
            several => BlockLayout::stack_batch(several)?,
        })
    }
}
