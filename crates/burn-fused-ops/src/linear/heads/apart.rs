//! Heads in two parts, of which each is attended to in its own way.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::linear::ops::LinearOps;
use crate::linear::values::HeadGroups;
use burn_blocksparse::OpError;
use burn_blocksparse::internal::check::same_device;
use burn_blocksparse::internal::device::served;

/// The first heads of a tensor, and the others. One step of the autodiff graph, whose backward pass puts the gradients side by side: gradients of two slices are
/// filled up with zeros and added.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fused_ops::internal::{split_head_groups, cat_head_groups};
///
/// let x = Tensor::<4>::from_data([[[[1.0]], [[2.0]], [[3.0]]]], &Device::flex());
/// let [first, others] = split_head_groups(x.clone(), 1)?;
/// assert_eq!(others.to_data().to_vec::<f32>().unwrap(), [2.0, 3.0]);
/// assert_eq!(cat_head_groups([first, others])?.to_data(), x.to_data());
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `x`: `[batch, heads, seq, width]`
/// - results: `[batch, first, seq, width]` and `[batch, heads − first, seq, width]`
///
/// # Errors
/// [`OpError`] if a part has no heads, or no feature of this crate serves the device.
pub fn split_head_groups(x: Tensor<4>, first: usize) -> Result<[Tensor<4>; 2], OpError> {
    served(&x.device())?;
    let [_, heads, ..] = x.dims();
    blocksparse::ensure! { OpError; (1..heads).contains(&first) => "first", format!("at least 1 and below the {heads} heads"), first; }
    let HeadGroups { first, others } =
        <Dispatch as LinearOps>::split_head_groups(x.into_dispatch(), first);
    Ok([first, others].map(Tensor::from_dispatch))
}

/// Both parts as one tensor, the inverse of [`split_head_groups`] and its gradient.
///
/// # Shapes
/// - `parts`: `[batch, first, seq, width]` and `[batch, others, seq, width]`, of one dtype
/// - result: `[batch, first + others, seq, width]`
///
/// # Errors
/// [`OpError`] if shapes, dtypes or devices do not fit each other, or no feature of this crate serves the device.
pub fn cat_head_groups(parts: [Tensor<4>; 2]) -> Result<Tensor<4>, OpError> {
    let [first, others] = parts;
    served(&first.device())?;
    let of = |x: &Tensor<4>| {
        let [batch, _, seq, width] = x.dims();
        [batch, seq, width]
    };
    OpError::expect_same("others' rows", of(&first), "the first's", of(&others))?;
    OpError::expect_same(
        "others' dtype",
        first.dtype(),
        "the first's",
        others.dtype(),
    )?;
    same_device(
        "others' device",
        &first.device(),
        "the first's",
        &others.device(),
    )?;
    let parts = HeadGroups {
        first: first.into_dispatch(),
        others: others.into_dispatch(),
    };
    Ok(Tensor::from_dispatch(
        <Dispatch as LinearOps>::cat_head_groups(parts),
    ))
}
