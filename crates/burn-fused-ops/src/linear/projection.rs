//! Projections to heads and from heads.

use crate::linear;
use crate::linear::heads::width_of;
use crate::linear::ops::LinearOps;
#[cfg(feature = "cube")]
use crate::linear::texts;
use crate::linear::values::{LinearCall, LinearForm, LinearInputs};
use crate::linear::{LinearOptions, check_bias};
use burn_blocksparse::internal::prelude::*;

/// [`fused_linear`](crate::fused_linear) and [`split_heads`](crate::split_heads) as one operation: multiplies one x with up to three weights, adds their
/// bias, and returns tensors by heads, as attention reads them. Nothing is copied where the product kernel writes heads itself.
///
/// The autodiff graph stores what `fused_linear` stores; gradients are those of the two steps. Deterministic.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::{LinearOptions, qkv_proj};
///
/// // Four query heads, and two heads of keys and values.
/// let device = Device::flex();
/// let x = Tensor::<3>::random([2, 100, 24], Distribution::Default, &device);
/// let weights = [64, 32, 32].map(|out| Tensor::random([24, out], Distribution::Default, &device));
/// let parts = [(4, 16), (2, 16), (2, 16)];
/// let qkv = qkv_proj(x, weights.to_vec(), None, &parts, &LinearOptions::default())?;
/// assert_eq!(qkv[0].dims(), [2, 4, 100, 16]);
/// assert_eq!(qkv[2].dims(), [2, 2, 100, 16]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `x`: `[batch, seq, in]`
/// - `weights`: 1 to 3 of `[in, out]`, concatenated in the product
/// - `bias`: `[Σ out]`
/// - `parts`: the heads of each result and their width, `Σ heads · width = Σ out`
/// - results: `[batch, heads, seq, width]` each, in `options.dtype`
///
/// # Errors
/// Those of `fused_linear` and `split_heads`.
pub fn qkv_proj(
    x: Tensor<3>,
    weights: Vec<Tensor<2>>,
    bias: Option<Tensor<1>>,
    parts: &[(usize, usize)],
    options: &LinearOptions,
) -> Result<Vec<Tensor<4>>, OpError> {
    let dtype = check(&x, &weights, bias.as_ref(), parts, options)?;
    let listed = std::array::from_fn(|part| parts.get(part).copied());
    let mut weights = weights.into_iter().map(Tensor::into_dispatch);
    let inputs = LinearInputs {
        x: x.into_dispatch(),
        weights: ThreeFloats::of_list(std::array::from_fn(|_| weights.next())),
        bias: bias.map(Tensor::into_dispatch).into(),
    };
    let form = LinearForm::ToHeads(listed);
    let made = <Dispatch as LinearOps>::linear_forward(inputs, LinearCall::new(dtype, form));
    let tensors = made.out.into_list().into_iter().flatten();
    Ok(tensors.map(Tensor::from_dispatch).collect())
}

/// `join_heads` and [`linear`](crate::linear()) as one operation: projects the output of attention. Where the product kernel reads heads itself, nothing is
/// copied and no copy is stored for the backward pass.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::{LinearOptions, out_proj};
///
/// let device = Device::flex();
/// let context = Tensor::<4>::random([2, 4, 100, 16], Distribution::Default, &device);
/// let weight = Tensor::random([64, 24], Distribution::Default, &device);
/// let y = out_proj(context, weight, &LinearOptions::default())?;
/// assert_eq!(y.dims(), [2, 100, 24]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `x`: `[batch, heads, seq, width]`
/// - `weight`: `[heads · width, out]`
/// - result: `[batch, seq, out]`, in `options.dtype`
///
/// # Errors
/// Those of `linear`.
pub fn out_proj(
    x: Tensor<4>,
    weight: Tensor<2>,
    options: &LinearOptions,
) -> Result<Tensor<3>, OpError> {
    let dtype = check_merge(&x, &weight, options)?;
    let form = LinearForm::FromHeads;
    let weights = ThreeFloats::one(weight.into_dispatch());
    let inputs = LinearInputs::new(x.into_dispatch(), weights);
    let made = <Dispatch as LinearOps>::linear_forward(inputs, LinearCall::new(dtype, form));
    Ok(Tensor::from_dispatch(made.out.into_one()))
}

impl LinearOptions {
    /// Returns the plan of [`qkv_proj`].
    ///
    /// # Errors
    /// Those of that call.
    pub fn explain_to_heads(
        &self,
        x: &Tensor<3>,
        weights: &[Tensor<2>],
        bias: Option<&Tensor<1>>,
        parts: &[(usize, usize)],
    ) -> Result<OpPlan, OpError> {
        let dtype = check(x, weights, bias, parts, self)?;
        Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
            let [batch, seq, inputs] = x.dims();
            let bias = bias.map(Tensor::dtype);
            let lengths = [batch, seq, inputs];
            texts::to_heads_text(device, dtype.into(), lengths, parts, bias)
        }))
    }

    /// Returns the plan of [`out_proj`].
    ///
    /// # Errors
    /// Those of that call.
    pub fn explain_from_heads(&self, x: &Tensor<4>, weight: &Tensor<2>) -> Result<OpPlan, OpError> {
        let dtype = check_merge(x, weight, self)?;
        Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
            let [_, outputs] = weight.dims();
            let dtypes = [x.dtype(), dtype.into()];
            texts::from_heads_text(device, dtypes, x.dims(), outputs)
        }))
    }
}

/// Checks the arguments and returns the dtype of the product.
fn check(
    x: &Tensor<3>,
    weights: &[Tensor<2>],
    bias: Option<&Tensor<1>>,
    parts: &[(usize, usize)],
    options: &LinearOptions,
) -> Result<FloatDType, OpError> {
    let dtype = linear::check(x, &linear::named(weights), options)?;
    let width: usize = weights.iter().map(|weight| weight.dims()[1]).sum();
    blocksparse::ensure! {
        OpError;
        width_of(parts)? == Some(width) => "parts", format!("heads of {width} columns in all, those of the weights"), format!("{parts:?}");
    }
    check_bias(bias, (width, "the weights' columns"), &x.device())?;
    Ok(dtype)
}

fn check_merge(
    x: &Tensor<4>,
    weight: &Tensor<2>,
    options: &LinearOptions,
) -> Result<FloatDType, OpError> {
    let [_, heads, _, dim] = x.dims();
    let width = (heads * dim, "x's heads · width");
    let weights = linear::named(std::slice::from_ref(weight));
    linear::check_width(x, width, &weights, options)
}
