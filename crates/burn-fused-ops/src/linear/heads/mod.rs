//! Splitting rows into heads, and joining heads into rows.
#[cfg(feature = "cube")]
pub(crate) mod kernels;
pub(crate) mod reference;

use crate::linear::check_bias;
use crate::linear::ops::LinearOps;
use crate::linear::values::{BiasedRows, JoinCall, MOST_PARTS};
use burn_blocksparse::internal::prelude::*;

/// Splits rows of concatenated queries, keys and values into tensors by heads, as attention reads them, and adds the product's bias in the same pass.
///
/// `parts` are (heads, width) pairs, one for each tensor, at most three. This is one node of the autodiff graph, which stores nothing; its backward pass
/// joins the gradients and sums that of the bias. Deterministic.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::split_heads;
///
/// // Four query heads, and two heads of keys and values.
/// let x = Tensor::<3>::random([2, 100, 8 * 16], Distribution::Default, &Device::flex());
/// let qkv = split_heads(x, None, &[(4, 16), (2, 16), (2, 16)])?;
/// assert_eq!(qkv[0].dims(), [2, 4, 100, 16]);
/// assert_eq!(qkv[2].dims(), [2, 2, 100, 16]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `x`: `[batch, seq, Σ heads · width]`
/// - `bias`: `[Σ heads · width]`
/// - results: `[batch, heads, seq, width]` each, in x's dtype
///
/// # Errors
/// [`OpError`] if the shapes or devices do not match, or there are no parts or more than three.
pub fn split_heads(
    x: Tensor<3>,
    bias: Option<Tensor<1>>,
    parts: &[(usize, usize)],
) -> Result<Vec<Tensor<4>>, OpError> {
    check_split(&x, bias.as_ref(), parts)?;
    let listed = std::array::from_fn(|part| parts.get(part).copied());
    let inputs = BiasedRows::new(x.into_dispatch(), bias.map(Tensor::into_dispatch));
    let tensors = <burn::backend::Dispatch as LinearOps>::split_heads(inputs, listed);
    let tensors = tensors.into_list().into_iter().flatten();
    Ok(tensors.map(Tensor::from_dispatch).collect())
}

/// Joins heads into rows for the output projection: the inverse of [`split_heads`] with one part. Differentiable.
///
/// # Shapes
/// - `x`: `[batch, heads, seq, width]`
/// - result: `[batch, seq, heads · width]`
///
/// # Errors
/// [`OpError::Backend`] if no feature of this crate serves the device.
pub fn join_heads(x: Tensor<4>) -> Result<Tensor<3>, OpError> {
    served(&x.device())?;
    let [batch, heads, seq, width] = x.dims();
    let parts = [Some((heads, width)), None, None];
    let call = JoinCall::new([batch, seq], parts, x.dtype().into());
    let tensors = ThreeFloats::one(x.into_dispatch());
    let joined = <burn::backend::Dispatch as LinearOps>::join_heads(tensors, call);
    Ok(Tensor::from_dispatch(joined.x))
}

/// Returns the plan of [`split_heads`] and its backward pass.
///
/// # Errors
/// Those of [`split_heads`].
pub fn explain(
    x: &Tensor<3>,
    bias: Option<&Tensor<1>>,
    parts: &[(usize, usize)],
) -> Result<OpPlan, OpError> {
    check_split(x, bias, parts)?;
    let [batch, seq, _] = x.dims();
    Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
        crate::linear::heads::kernels::text(device, [batch * seq, seq], parts, x.dtype())
    }))
}

fn check_split(
    x: &Tensor<3>,
    bias: Option<&Tensor<1>>,
    parts: &[(usize, usize)],
) -> Result<(), OpError> {
    served(&x.device())?;
    let [.., width] = x.dims();
    let sum = width_of(parts)?;
    let expected = sum.map_or_else(
        || format!("the heads of {parts:?}"),
        |sum| format!("{sum}, the heads of all parts"),
    );
    blocksparse::ensure! { OpError; sum == Some(width) => "x's width", expected, width; }
    check_bias(bias, (width, "x's width"), &x.device())
}

/// Returns the width of all parts, or `None` if it overflows.
pub(crate) fn width_of(parts: &[(usize, usize)]) -> Result<Option<usize>, OpError> {
    blocksparse::ensure! { OpError; (1..=MOST_PARTS).contains(&parts.len()) => "parts", format!("of 1 to {MOST_PARTS} tensors"), parts.len(); }
    let add = |sum: usize, (heads, dim): &(usize, usize)| sum.checked_add(heads.checked_mul(*dim)?);
    Ok(parts.iter().try_fold(0, add))
}
