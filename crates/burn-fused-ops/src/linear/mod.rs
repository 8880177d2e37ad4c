//! Linear layers: products of activations with weights.

#[doc(hidden)]
pub mod activation;
#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
#[cfg(feature = "cube")]
pub(crate) mod cube_products;
#[cfg(feature = "cube")]
pub(crate) mod few_rows;
#[cfg(feature = "cube")]
mod fused;
#[doc(hidden)]
pub mod heads;
#[cfg(all(feature = "cube", feature = "fusion"))]
pub(crate) mod matmul;
#[doc(hidden)]
pub mod mlp;
#[doc(hidden)]
pub mod ops;
pub(crate) mod products;
#[doc(hidden)]
pub mod projection;
#[cfg(feature = "cube")]
mod texts;
#[doc(hidden)]
pub mod values;
#[cfg(feature = "cube")]
pub(crate) mod wgmma;

use crate::linear::activation::Activation;
use crate::linear::ops::LinearOps;
use burn_blocksparse::internal::prelude::*;
use values::{LinearCall, LinearForm, LinearInputs, WEIGHTS};

/// Options of [`linear`]. Build them from [`Default`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct LinearOptions {
    /// Dtype of the factors and of the product; default x's. Sums are f32, f64 for f64.
    pub dtype: Option<FloatDType>,
}

impl LinearOptions {
    blocksparse::setters! {
        /// Sets the dtype of the factors and of the product.
        dtype: Some(FloatDType),
    }
}

/// Returns `x · W`, with both factors rounded to the product's dtype first: a layer's weights may stay f32 while its product is bf16.
///
/// This is one node of the autodiff graph, which stores x (rounded, if it was rounded) and the rounded weight only. The gradient with respect to the weight
/// is summed in f32 and has the weight's dtype. Gradients of a frozen weight, or of an x without gradient, are not computed. Deterministic.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::{LinearOptions, linear};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<3>::random([2, 5, 4], Distribution::Default, &device);
/// let weight = Tensor::<2>::random([4, 6], Distribution::Default, &device).require_grad();
/// let y = linear(x, weight.clone(), &LinearOptions::default())?;
/// assert_eq!(y.dims(), [2, 5, 6]);
/// let gradients = y.sum().backward();
/// assert_eq!(weight.grad(&gradients).unwrap().dims(), [4, 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `x`: `[.., in]`
/// - `weight`: `[in, out]`
/// - result: `[.., out]`, in `options.dtype`
///
/// # Errors
/// [`OpError`] if the shapes or devices do not match, or the device does not support the dtype.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    options: &LinearOptions,
) -> Result<Tensor<D>, OpError> {
    fused_linear(x, vec![weight], options)
}

/// [`linear`] with up to three weights concatenated in one product, such as those of queries, keys and values. Each weight gets its own gradient.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::{LinearOptions, fused_linear};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::random([5, 4], Distribution::Default, &device);
/// let weights = [6, 2].map(|out| Tensor::<2>::random([4, out], Distribution::Default, &device));
/// let y = fused_linear(x, weights.to_vec(), &LinearOptions::default())?;
/// assert_eq!(y.dims(), [5, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `x`: `[.., in]`
/// - `weights`: 1 to 3 of `[in, out]`, each with an `out` of its own
/// - result: `[.., Σ out]`, in `options.dtype`
///
/// # Errors
/// Those of [`linear`]; also if there are no weights or more than three.
pub fn fused_linear<const D: usize>(
    x: Tensor<D>,
    weights: Vec<Tensor<2>>,
    options: &LinearOptions,
) -> Result<Tensor<D>, OpError> {
    let dtype = check(&x, &named(&weights), options)?;
    let mut weights = weights.into_iter().map(Tensor::into_dispatch);
    let weights = ThreeFloats::of_list(std::array::from_fn(|_| weights.next()));
    let inputs = LinearInputs::new(x.into_dispatch(), weights);
    let made = <Dispatch as LinearOps>::linear_forward(inputs, LinearCall::rows(dtype));
    Ok(Tensor::from_dispatch(made.out.into_one()))
}

/// Returns `f(x · gate) ∘ (x · up)`: the inner half of a gated feed-forward network (Shazeer, 2020), SwiGLU with [`Activation::Silu`]. With few rows and
/// without a backward pass, one kernel reads both weights in a single pass. Deterministic.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::{Activation, LinearOptions, gated_linear};
///
/// let device = Device::flex();
/// let x = Tensor::<2>::random([5, 4], Distribution::Default, &device);
/// let [gate, up] = [(); 2].map(|()| Tensor::<2>::random([4, 6], Distribution::Default, &device));
/// let y = gated_linear(x, gate, up, Activation::Silu, &LinearOptions::default())?;
/// assert_eq!(y.dims(), [5, 6]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `x`: `[.., in]`
/// - `gate`, `up`: `[in, out]`
/// - result: `[.., out]`, in `options.dtype`
///
/// # Errors
/// Those of [`linear`]; also if the weights' shapes differ.
pub fn gated_linear<const D: usize>(
    x: Tensor<D>,
    gate: Tensor<2>,
    up: Tensor<2>,
    activation: Activation,
    options: &LinearOptions,
) -> Result<Tensor<D>, OpError> {
    let weights = [
        (&gate, ["gate's in", "gate's device"]),
        (&up, ["up's in", "up's device"]),
    ];
    let dtype = check(&x, &weights, options)?;
    let ([_, width], [_, got]) = (gate.dims(), up.dims());
    blocksparse::ensure! { OpError; got == width => "up's out", format!("{width}, the gate's"), got; }
    let weights = [Some(gate), Some(up), None].map(|weight| weight.map(Tensor::into_dispatch));
    let inputs = LinearInputs::new(x.into_dispatch(), ThreeFloats::of_list(weights));
    let call = LinearCall::new(dtype, LinearForm::Gated(activation));
    let made = <Dispatch as LinearOps>::linear_forward(inputs, call);
    Ok(Tensor::from_dispatch(made.out.into_one()))
}

impl LinearOptions {
    /// Returns the plan of [`fused_linear`].
    ///
    /// # Errors
    /// Those of that call.
    pub fn explain<const D: usize>(
        &self,
        x: &Tensor<D>,
        weights: &[Tensor<2>],
    ) -> Result<OpPlan, OpError> {
        check(x, &named(weights), self)?;
        Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
            let dtype = (self.dtype).map_or(x.dtype(), |dtype| dtype.into());
            let [rows, _] = matrix(&x.shape());
            let out = weights.iter().map(|weight| weight.dims()[1]).sum();
            let sizes = [rows, weights[0].dims()[0], out];
            backend::text(device, dtype, sizes)
        }))
    }
}

/// Weight, with the names of its height and of its device in error messages.
pub(crate) type Named<'a> = (&'a Tensor<2>, [&'static str; 2]);

pub(crate) fn named(weights: &[Tensor<2>]) -> Vec<Named<'_>> {
    let names = ["weight's in", "weight's device"];
    weights.iter().map(|weight| (weight, names)).collect()
}

/// Checks the arguments and returns the dtype of the product.
pub(crate) fn check<const D: usize>(
    x: &Tensor<D>,
    weights: &[Named],
    options: &LinearOptions,
) -> Result<FloatDType, OpError> {
    check_width(x, (x.dims()[D - 1], "x's last dimension"), weights, options)
}

/// [`check`] for an x with rows of `width` elements.
pub(crate) fn check_width<const D: usize>(
    x: &Tensor<D>,
    (width, what): (usize, &str),
    weights: &[Named],
    options: &LinearOptions,
) -> Result<FloatDType, OpError> {
    let device = x.device();
    served(&device)?;
    blocksparse::ensure! { OpError; !weights.is_empty() && weights.len() <= WEIGHTS => "weights", format!("1 to {WEIGHTS} matrices"), weights.len(); }
    for (weight, [height, place]) in weights {
        let [inputs, _] = weight.dims();
        blocksparse::ensure! { OpError; inputs == width => height, format!("{width}, {what}"), inputs; }
        same_device(place, &device, "x's", &weight.device())?;
    }
    let dtype = match options.dtype {
        Some(dtype) => dtype,
        None => x.dtype().into(),
    };
    let dtypes = [x.dtype(), dtype.into()].into_iter();
    let all = dtypes.chain(weights.iter().map(|(weight, _)| weight.dtype()));
    for dtype in all {
        supported("dtype", &x.device(), dtype)?;
    }
    Ok(dtype)
}

/// Checks that a bias has this width and is on the rows' device.
pub(crate) fn check_bias(
    bias: Option<&Tensor<1>>,
    (width, whose): (usize, &str),
    device: &burn::tensor::Device,
) -> Result<(), OpError> {
    let Some(bias) = bias else { return Ok(()) };
    let [got] = bias.dims();
    blocksparse::ensure! { OpError; got == width => "bias's length", format!("{width}, {whose}"), got; }
    same_device("bias's device", device, "x's", &bias.device())
}

/// Checks that the device supports a dtype.
pub(crate) fn supported(
    argument: &'static str,
    device: &burn::tensor::Device,
    dtype: DType,
) -> Result<(), OpError> {
    let known = matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    blocksparse::ensure! {
        OpError;
        known && device.supports_dtype(dtype) => argument, "F32, F64, F16 or BF16, and one that the device has", format!("{dtype:?}");
    }
    Ok(())
}
