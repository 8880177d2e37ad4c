//! Burn's own attention function: its arguments, as layouts.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use blocksparse::{BlockLayout, BlockMask, LayoutError, LayoutShape, Pattern};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Tensor};

use crate::attention::SparseAttentionCall;
use crate::error::OpError;

/// The block size of layouts made here.
const BLOCK: usize = 64;

/// Layouts that are kept: a program has few lengths.
const KEPT: usize = 64;

/// Layouts without masks, by shape and causality, the oldest first.
static LAYOUTS: Mutex<VecDeque<(LayoutShape, bool, BlockLayout)>> = Mutex::new(VecDeque::new());

/// [`burn::tensor::module::attention`], with a fused backward pass: training stores no `seq_q × seq_kv` tensor beside `mask` and `attn_bias` themselves.
/// Changing the `use` line is enough.
///
/// `softmax(softcap(scale · q · kᵀ), masked, + attn_bias) · v`, as Burn computes it: scale, softcap, mask (`true` is masked out), causality (aligned
/// bottom-right), bias.
///
/// ```
/// use burn::tensor::ops::AttentionModuleOptions;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::attention; // was burn::tensor::module::attention
///
/// let device = Device::flex().autodiff();
/// let q = Tensor::<4>::random([1, 2, 100, 16], Distribution::Default, &device).require_grad();
/// let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: true };
/// let out = attention(q.clone(), q.clone(), q.clone(), None, None, options);
/// assert_eq!(q.grad(&out.sum().backward()).unwrap().dims(), [1, 2, 100, 16]);
/// ```
///
/// # Shapes
/// - `query`, `key`, `value`: as [`sparse_attention`](crate::sparse_attention)'s, so key heads may be fewer than query heads
/// - `mask`: `[batch or 1, heads or 1, seq_q or 1, seq_kv or 1]`
/// - `attn_bias`: the same, in the dtype of `query`
/// - returns `[batch, heads, seq_q, value_dim]`
///
/// # Masks and biases
/// Every call with a mask reads it from its device, which waits for all that was asked of it before. [`mask_layout`] reads a mask once, for many calls.
/// Calls without one read nothing.
///
/// Rows in which everything is masked, by `mask` or because causality leaves no key (`seq_q > seq_kv`), give zeros and zero gradients, where the backward pass of
/// Burn's fallback may give NaN.
///
/// Unlike Burn's, values of `attn_bias` must be finite and at most about 1e8 in size: pairs are masked by `mask`, not by −∞.
///
/// # Panics
/// With the text of [`try_attention`]'s error.
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

/// [`attention`], with errors in place of panics.
///
/// # Errors
/// As [`sparse_attention`](crate::sparse_attention), if the mask or the bias does not fit, and if the mask cannot be read.
pub fn try_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    attn_bias: Option<Tensor<4>>,
    options: AttentionModuleOptions,
) -> Result<Tensor<4>, OpError> {
    let [batch, heads, seq_q, _] = query.dims();
    let seq_kv = key.dims()[2];
    let causal = options.is_causal;
    let layout = match mask {
        Some(mask) => {
            let entries = mask.dims()[0];
            if entries != 1 && entries != batch {
                let expected = format!("{batch} or 1");
                return Err(OpError::argument("mask's batch", expected, entries));
            }
            mask_layout(mask, heads, [seq_q, seq_kv], causal)?
        }
        None => kept_layout(LayoutShape::new(heads, [seq_q, seq_kv], BLOCK), causal)?,
    };
    let mut call = SparseAttentionCall::new(query, key, value, &layout);
    if let Some(scale) = options.scale {
        call = call.scale(scale);
    }
    if let Some(softcap) = options.softcap {
        call = call.softcap(softcap);
    }
    if let Some(bias) = attn_bias {
        let [batch, heads, rows, columns] = bias.dims();
        // One number for all keys of a row: the call wants one for each.
        call = call.bias(match columns {
            1 => bias.expand([batch, heads, rows, seq_kv]),
            _ => bias,
        });
    }
    Ok(call.run()?.out)
}

/// The layout of the pairs that a mask of Burn's [`attention`] leaves, exactly, with those of causality if `causal`. Reads the mask from its device, which
/// waits for all that was asked of it before; the layout serves any number of calls of [`SparseAttentionCall`].
///
/// ```
/// use burn::tensor::{Bool, Device, Tensor};
/// use burn_blocksparse::mask_layout;
///
/// // The first key is masked out for all.
/// let mask = Tensor::<4, Bool>::from_data([[[[true, false, false]]]], &Device::flex());
/// let layout = mask_layout(mask, 2, [3, 3], true)?;
/// assert_eq!(layout.to_dense(0)[1], [false, true, false]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// `mask`: `[batch or 1, heads or 1, seq_q or 1, seq_kv or 1]`, `true` is masked out; `lengths`: `[seq_q, seq_kv]`.
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
    let [seq_q, seq_kv] = lengths;
    let expected = [
        ("mask's heads", heads),
        ("mask's seq_q", seq_q),
        ("mask's seq_kv", seq_kv),
    ];
    for ((argument, expected), got) in expected.into_iter().zip(&dims[1..]) {
        if *got != 1 && *got != expected {
            return Err(OpError::argument(argument, format!("{expected} or 1"), got));
        }
    }
    let masked: Vec<bool> = (mask.try_into_data().map_err(OpError::read)?)
        .iter::<bool>()
        .collect();
    let [entries, mask_heads, rows, columns] = dims;
    let at = |entry: usize, head: usize, row: usize, column: usize| {
        let line = (entry * mask_heads + head) * rows + row.min(rows - 1);
        masked[line * columns + column.min(columns - 1)]
    };
    // Heads that share a mask are walked once.
    let shape = LayoutShape::new(mask_heads, lengths, BLOCK);
    let layouts = (0..entries).map(|entry| {
        let layout = BlockLayout::from_block_fn("mask", shape, |head, q_block, kv_block| {
            Some(BlockMask::from_fn(BLOCK, |r, c| {
                let (row, column) = (q_block * BLOCK + r, kv_block * BLOCK + c);
                let inside = row < seq_q && column < seq_kv;
                let seen = !causal || column + seq_q <= row + seq_kv;
                inside && seen && !at(entry, head, row, column)
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

/// The layout of all pairs, or of those of causality, made once for a shape.
fn kept_layout(shape: LayoutShape, causal: bool) -> Result<BlockLayout, LayoutError> {
    let mut kept = LAYOUTS.lock().unwrap_or_else(PoisonError::into_inner);
    let found = kept
        .iter()
        .find(|(of, by, _)| (*of, *by) == (shape, causal));
    if let Some((.., layout)) = found {
        return Ok(layout.clone());
    }
    let pattern = match causal {
        true => Pattern::causal(),
        false => Pattern::dense(),
    };
    let layout = BlockLayout::new(&pattern, shape)?;
    if kept.len() == KEPT {
        kept.pop_front();
    }
    kept.push_back((shape, causal, layout.clone()));
    Ok(layout)
}
