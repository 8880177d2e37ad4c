//! Feed-forward networks: two products with an activation between them.

#[cfg_attr(not(feature = "autodiff"), allow(dead_code))]
pub(crate) mod steps;

use crate::linear;
use crate::linear::activation::kind::Activation;
use crate::linear::ops::LinearOps;
use crate::linear::values::{MlpCall, MlpInputs};
use crate::linear::{LinearOptions, check_bias};
use burn_blocksparse::internal::prelude::*;

/// Weights of [`mlp`] and the bias before the activation. Add the second bias with the operation that consumes the result, or with `bias_activation`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MlpParams {
    /// First weight, `[in, hidden]`.
    pub inner: Tensor<2>,
    /// Bias before the activation, `[hidden]`, of any float dtype.
    pub bias: Option<Tensor<1>>,
    /// Second weight, `[hidden, out]`.
    pub outer: Tensor<2>,
}

impl MlpParams {
    /// Returns parameters without a bias.
    pub fn new(inner: Tensor<2>, outer: Tensor<2>) -> Self {
        Self {
            inner,
            bias: None,
            outer,
        }
    }

    blocksparse::setters! {
        /// Sets the bias.
        bias: Some(Tensor<1>),
    }
}

/// Options of [`mlp`]. Build them from [`Default`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct MlpOptions {
    /// Dtype of the factors and of the products; default x's. Sums are f32, f64 for f64.
    pub dtype: Option<FloatDType>,
    /// True if the backward pass computes the first product again instead of storing it.
    pub recompute: bool,
}

impl MlpOptions {
    blocksparse::setters! {
        /// Sets the dtype of the factors and of the products.
        dtype: Some(FloatDType),
        /// Sets whether the backward pass computes the first product again. This stores `hidden` elements less for each position and takes a third more time
        /// for forward products.
        recompute: bool,
    }
}

/// Returns `f(x · W₁ + b) · W₂`: a transformer's feed-forward network without its last bias, equal to [`linear`](crate::linear()), `bias_activation` and
/// `linear` in sequence.
///
/// This is one node of the autodiff graph. Of the two tensors of the hidden width it stores the one before the activation, or none; the backward pass
/// recomputes the other in the pass that differentiates the activation. The rest is as in those three: gradients with respect to weights are summed in f32,
/// frozen weights get none, and the same input gives the same bits.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::{Activation, MlpOptions, MlpParams, mlp};
///
/// let device = Device::flex().autodiff();
/// let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device).require_grad();
/// let (inner, outer) = (random([4, 16]), random([16, 4]));
/// let params = MlpParams::new(inner.clone(), outer).bias(Tensor::zeros([16], &device));
/// let x = Tensor::<3>::random([2, 5, 4], Distribution::Default, &device);
/// let y = mlp(x, params, Activation::GeluErf, &MlpOptions::default())?;
/// assert_eq!(y.dims(), [2, 5, 4]);
/// let gradients = y.sum().backward();
/// assert_eq!(inner.grad(&gradients).unwrap().dims(), [4, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `x`: `[.., in]`
/// - result: `[.., out]`, in `options.dtype`
///
/// # Errors
/// [`OpError`] if the shapes or devices do not match, or the device does not support the dtype.
pub fn mlp<const D: usize>(
    x: Tensor<D>,
    params: MlpParams,
    activation: Activation,
    options: &MlpOptions,
) -> Result<Tensor<D>, OpError> {
    let dtype = check(&x, &params, options)?;
    let MlpParams { inner, bias, outer } = params;
    let inputs = MlpInputs {
        x: x.into_dispatch(),
        inner: inner.into_dispatch(),
        bias: bias.map(Tensor::into_dispatch).into(),
        outer: outer.into_dispatch(),
    };
    let call = MlpCall {
        activation,
        dtype,
        recompute: options.recompute,
    };
    Ok(Tensor::from_dispatch(<Dispatch as LinearOps>::mlp(
        inputs, call,
    )))
}

impl MlpOptions {
    /// Returns the plan of [`mlp`]: its matmuls, and the activation between them.
    ///
    /// # Errors
    /// Those of that call.
    pub fn explain<const D: usize>(
        &self,
        x: &Tensor<D>,
        params: &MlpParams,
        activation: Activation,
    ) -> Result<OpPlan, OpError> {
        let dtype = check(x, params, self)?;
        let [rows, _] = matrix(&x.shape());
        let ([inputs, hidden], [_, outputs]) = (params.inner.dims(), params.outer.dims());
        Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
            use crate::linear::backend::text;
            use crate::linear::texts::inner_text;

            let bias = params.bias.as_ref().map(Tensor::dtype);
            let dtype = dtype.into();
            let parts = [
                inner_text(device, dtype, [rows, inputs, hidden], bias, activation),
                text(device, dtype, [rows, hidden, outputs]),
            ];
            let is_ok = parts.iter().all(Result::is_ok);
            let text = parts.map(|part| part.unwrap_or_else(|why| why)).join("; ");
            if is_ok { Ok(text) } else { Err(text) }
        }))
    }
}

/// Checks the arguments and returns the dtype of the products.
fn check<const D: usize>(
    x: &Tensor<D>,
    params: &MlpParams,
    options: &MlpOptions,
) -> Result<FloatDType, OpError> {
    let products = LinearOptions {
        dtype: options.dtype,
    };
    let named = ["the inner weight's in", "the inner weight's device"];
    let dtype = linear::check(x, &[(&params.inner, named)], &products)?;
    let [_, hidden] = params.inner.dims();
    let [got, _] = params.outer.dims();
    blocksparse::ensure! { OpError; got == hidden => "the outer weight's in", format!("{hidden}, the inner weight's out"), got; }
    linear::supported("dtype", &x.device(), params.outer.dtype())?;
    let outer = params.outer.device();
    same_device("the outer weight's device", &x.device(), "x's", &outer)?;
    check_bias(
        params.bias.as_ref(),
        (hidden, "the inner weight's out"),
        &x.device(),
    )?;
    Ok(dtype)
}
