//! Dropout of a tensor.

use blocksparse::ElementDropout;

use crate::norm::check_dropout;
use crate::norm::ops::NormOps;
use burn_blocksparse::internal::prelude::*;

/// Dropout of `x`, `[.., width]`: each element is kept with probability `1 − probability` and divided by it; the others become 0 (Srivastava et al., 2014,
/// with the division at training). The mask depends only on the seed, the site and the element's position ([`ElementDropout`]), so the backward pass computes
/// it again and nothing is stored. `add_norm` applies dropout to a branch itself.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fused_ops::{ElementDropout, dropout};
///
/// let x = Tensor::<2>::ones([100, 100], &Device::flex());
/// let kept = dropout(x, &ElementDropout::new(0.2, 7, 0))?;
/// assert!((kept.mean().into_scalar::<f32>() - 1.0).abs() < 0.02);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Errors
/// [`OpError`] if the probability is not in `[0, 1)`, or the device is not served.
pub fn dropout<const D: usize>(
    x: Tensor<D>,
    dropout: &ElementDropout,
) -> Result<Tensor<D>, OpError> {
    check(&x, dropout)?;
    if dropout.probability == 0.0 {
        return Ok(x);
    }
    let kept = <Dispatch as NormOps>::stream_dropout(x.into_dispatch(), *dropout);
    Ok(Tensor::from_dispatch(kept))
}

/// Returns the plan of [`dropout`](dropout()) for these arguments.
///
/// # Errors
/// Those of [`dropout`](dropout()).
pub fn explain<const D: usize>(x: &Tensor<D>, dropout: &ElementDropout) -> Result<OpPlan, OpError> {
    check(x, dropout)?;
    let sizes = matrix(&x.shape());
    Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
        let element = burn::backend::cubecl::dtype_to_elem_type(x.dtype());
        crate::kernels::rows::dropout::stream_dropout_text(&device.client(), sizes, element)
    }))
}

fn check<const D: usize>(x: &Tensor<D>, dropout: &ElementDropout) -> Result<(), OpError> {
    served(&x.device())?;
    check_dropout("dropout's probability", Some(dropout), &x.device())
}
