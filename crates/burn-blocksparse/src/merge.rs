//! Merges attention over disjoint sets of keys by lse.

use crate::base::prelude::*;
use crate::rows::ops::RowOps;
use crate::rows::reference::LOWEST;
use crate::rows::values::{MergedOutput, MergedParts};

/// Merges two attention outputs over the same queries and disjoint keys into attention over all keys: `out = (out_a · exp(lse_a) + out_b · exp(lse_b)) /
/// (exp(lse_a) + exp(lse_b))`, `lse = ln(exp(lse_a) + exp(lse_b))` (split keys in FlashAttention, and ring attention). Differentiable in all arguments. Merge
/// more than two parts one after the other.
///
/// Rows without keys in either part give zeros and lse −∞.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_blocksparse::{Pattern, SparseAttentionCall, merge_attention, sparse_attention};
///
/// let q = Tensor::<4>::random([1, 2, 64, 16], Distribution::Default, &Device::flex());
/// let near = Pattern::local(16);
/// let far = Pattern::from_fn("far", |_, i, j| i - j >= 16);
/// let part = |pattern: &Pattern| {
///     let layout = pattern.layout(2, 64, 16).unwrap();
///     SparseAttentionCall::new(q.clone(), q.clone(), q.clone(), &layout).run_with_lse()
/// };
/// let ((out_a, lse_a), (out_b, lse_b)) = (part(&near)?, part(&far)?);
/// let (out, _) = merge_attention(out_a, lse_a, out_b, lse_b)?;
/// let causal = Pattern::causal().layout(2, 64, 16)?;
/// let whole = sparse_attention(q.clone(), q.clone(), q, &causal)?;
/// assert!((out - whole).abs().max().into_scalar::<f32>() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `out_a`, `out_b`: `[batch, heads, seq_q, value_dim]`
/// - `lse_a`, `lse_b`: `[batch, heads, seq_q]`, as returned by [`SparseAttentionCall::lse`](crate::SparseAttentionCall::lse): f32, or f64 for f64
/// - returns out and lse with the same shapes and dtypes
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not fit each other.
pub fn merge_attention(
    out_a: Tensor<4>,
    lse_a: Tensor<3>,
    out_b: Tensor<4>,
    lse_b: Tensor<3>,
) -> Result<(Tensor<4>, Tensor<3>), OpError> {
    let [batch, heads, seq_q, _] = out_a.dims();
    let rows = [batch, heads, seq_q];
    OpError::expect_same("lse_a's shape", rows, "out_a's rows", lse_a.dims())?;
    OpError::expect_same("out_b's shape", out_a.dims(), "out_a's", out_b.dims())?;
    OpError::expect_same("lse_b's shape", rows, "out_a's rows", lse_b.dims())?;
    let dtype = out_a.dtype();
    let accumulator = sums_of(dtype);
    let sums = "that of out_a's sums";
    OpError::expect_same("out_b's dtype", dtype, "out_a's", out_b.dtype())?;
    OpError::expect_same("lse_a's dtype", accumulator, sums, lse_a.dtype())?;
    OpError::expect_same("lse_b's dtype", accumulator, sums, lse_b.dtype())?;
    let device = out_a.device();
    for (argument, got) in [
        ("lse_a's device", lse_a.device()),
        ("out_b's device", out_b.device()),
        ("lse_b's device", lse_b.device()),
    ] {
        OpError::expect_same(argument, device.clone(), "out_a's", got)?;
    }
    let Shares { a, b, lse } = shares(lse_a, lse_b);
    let weighted =
        |out: Tensor<4>, share: Tensor<3>| out.cast(accumulator) * share.unsqueeze_dim(3);
    let out = weighted(out_a, a) + weighted(out_b, b);
    Ok((out.cast(dtype), lse))
}

/// Merges a part of each row with gathered other parts into attention over all of their keys, summed in f32 and rounded once.
///
/// # Shapes
/// - `own`: out and lse as in [`merge_attention`], also those of the result
/// - `others`: out `[batch, heads, places, value_dim]` and lse `[batch, heads, places]`
/// - `places`: indices into `others` for each row, `[batch, heads, seq_q, most]`, negative for none
/// - `choices`: the inverse of `places`. For each place: its row times `most`, plus its index in that row of `places`; `[batch, heads, places]`, negative for
///   none
///
/// Nothing is checked, neither that shapes, dtypes and devices fit each other nor that `choices` is the inverse of `places`.
pub fn merge_parts(
    (own, own_lse): (Tensor<4>, Tensor<3>),
    (others, other_lse): (Tensor<4>, Tensor<3>),
    places: Tensor<4, Int>,
    choices: Tensor<3, Int>,
) -> (Tensor<4>, Tensor<3>) {
    let (places, choices) = (places.without_autodiff(), choices.without_autodiff());
    let inputs = MergedParts {
        own: own.into_dispatch(),
        own_lse: own_lse.into_dispatch(),
        rows: others.into_dispatch(),
        lses: other_lse.into_dispatch(),
        places: places.into_dispatch(),
        choices: choices.into_dispatch(),
    };
    let MergedOutput { out, lse } = <Dispatch as RowOps>::merged_parts(inputs);
    (Tensor::from_dispatch(out), Tensor::from_dispatch(lse))
}

/// Shares of two parts in the softmax over their union.
pub struct Shares {
    /// `exp(lse_a − lse)`
    pub a: Tensor<3>,
    /// `exp(lse_b − lse)`
    pub b: Tensor<3>,
    /// `ln(exp(lse_a) + exp(lse_b))`
    pub lse: Tensor<3>,
}

pub fn shares(lse_a: Tensor<3>, lse_b: Tensor<3>) -> Shares {
    let [a, b] = [lse_a, lse_b].map(|lse| lse.clamp_min(LOWEST));
    // The result and its gradient do not depend on the maximum.
    let max = a.clone().max_pair(b.clone()).detach();
    let empty = max.clone().lower_equal_elem(LOWEST);
    let [a, b] = [a, b].map(|lse| (lse - max.clone()).exp());
    let total = a.clone() + b.clone();
    let lse = (max + total.clone().log()).mask_fill(empty, f64::NEG_INFINITY);
    Shares {
        a: a / total.clone(),
        b: b / total,
        lse,
    }
}
