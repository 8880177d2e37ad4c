//! A bias and an activation in one pass.
#[cfg(feature = "cube")]
pub(crate) mod kernels;
#[doc(hidden)]
pub mod kind;
pub(crate) mod reference;

use crate::linear::check_bias;
use crate::linear::ops::LinearOps;
use crate::linear::values::BiasedRows;
use burn_blocksparse::internal::prelude::*;
pub use kind::Activation;

/// Returns `f(x + bias)`, computed in f32 (f64 for f64) and rounded once.
///
/// This is one node of the autodiff graph, which stores only x and the bias. The backward pass computes the gradient with respect to x and sums it to the
/// bias's in one pass. Deterministic.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::{Activation, bias_activation};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<3>::random([2, 5, 8], Distribution::Default, &device);
/// let bias = Tensor::<1>::zeros([8], &device).require_grad();
/// let y = bias_activation(x, Some(bias.clone()), Activation::Silu)?;
/// let gradients = y.sum().backward();
/// assert_eq!(bias.grad(&gradients).unwrap().dims(), [8]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `x` and result: `[.., width]`
/// - `bias`: `[width]`, of any float dtype
///
/// # Errors
/// [`OpError`] if the shapes or devices do not match.
pub fn bias_activation<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    activation: Activation,
) -> Result<Tensor<D>, OpError> {
    check(&x, bias.as_ref())?;
    if bias.is_none() && activation == Activation::None {
        return Ok(x);
    }
    let inputs = BiasedRows::new(x.into_dispatch(), bias.map(Tensor::into_dispatch));
    let y = <burn::backend::Dispatch as LinearOps>::bias_activation(inputs, activation);
    Ok(Tensor::from_dispatch(y))
}

impl Activation {
    /// Returns the plan of [`bias_activation`] and its backward pass.
    ///
    /// # Errors
    /// Those of [`bias_activation`].
    pub fn explain<const D: usize>(
        self,
        x: &Tensor<D>,
        bias: Option<&Tensor<1>>,
    ) -> Result<OpPlan, OpError> {
        check(x, bias)?;
        let sizes = matrix(&x.shape());
        Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
            crate::linear::activation::kernels::text(device, sizes, x.dtype(), self)
        }))
    }
}

fn check<const D: usize>(x: &Tensor<D>, bias: Option<&Tensor<1>>) -> Result<(), OpError> {
    served(&x.device())?;
    let width = x.dims()[D - 1];
    check_bias(bias, (width, "x's width"), &x.device())
}
