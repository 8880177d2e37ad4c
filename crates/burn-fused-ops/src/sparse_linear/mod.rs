//! Block-sparse linear layers: products with weights of which only some blocks exist.
#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
#[doc(hidden)]
pub mod ops;
#[cfg(feature = "cube")]
pub(crate) mod wgmma;

pub(crate) mod products;
#[doc(hidden)]
pub mod values;

pub use blocksparse::{WEIGHT_BLOCK_SIZES, WeightLayout, WeightPattern};

use crate::linear::activation::{Activation, bias_activation};
use crate::linear::{check_bias, supported};
use crate::sparse_linear::ops::BlockSparseLinearOps;
use burn_blocksparse::internal::prelude::*;
use values::{SparseLinearCall, SparseLinearInputs};

/// Options and optional tensors of [`block_sparse_linear`]. Build them from [`Default`].
#[derive(Clone, Debug, Default)]
#[must_use]
#[non_exhaustive]
pub struct BlockSparseLinearOptions {
    /// Bias `[outputs]`, of any float dtype.
    pub bias: Option<Tensor<1>>,
    /// Factor of each block of the weight: `[blocks]`, of the weight's dtype.
    pub gates: Option<Tensor<1>>,
    /// Dtype of the factors and of the product; default x's. Sums are f32, f64 for f64.
    pub dtype: Option<FloatDType>,
}

impl BlockSparseLinearOptions {
    blocksparse::setters! {
        /// Sets the bias added to the product: `[outputs]`.
        bias: Some(Tensor<1>),
        /// Sets the factor of each kept block: `[blocks]`.
        gates: Some(Tensor<1>),
        /// Sets the dtype of the factors and of the product.
        dtype: Some(FloatDType),
    }
}

/// Returns `x · W + bias` with a block-sparse weight (Gray, Radford, Kingma, "GPU Kernels for Block-Sparse Weights", 2017): `W` is zero outside the blocks of
/// the layout. Computation and the weight's memory are proportional to the kept blocks, forward and backward.
///
/// As with [`linear`](crate::linear()), x and the weight are rounded to the product's dtype first, the product is one node of the autodiff graph, which
/// stores its two factors, and the gradient with respect to the weight is summed in f32 and has the weight's dtype. Gates are multiplied with the weight's
/// blocks in its own dtype before; their gradients are those of that multiplication. Deterministic.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fused_ops::sparse_linear::{
///     BlockSparseLinearOptions, WeightLayout, block_sparse_linear,
/// };
///
/// let device = Device::flex().autodiff();
/// let layout = WeightLayout::small_world([64, 128], 16, 0.25, 0.1, 1)?;
/// let x = Tensor::<3>::random([2, 5, 64], Distribution::Default, &device);
/// let weight = Tensor::<3>::random(layout.shape(), Distribution::Default, &device).require_grad();
/// let options = BlockSparseLinearOptions::default().bias(Tensor::zeros([128], &device));
/// let y = block_sparse_linear(x, weight.clone(), &layout, options)?;
/// assert_eq!(y.dims(), [2, 5, 128]);
/// let gradients = y.sum().backward();
/// assert_eq!(weight.grad(&gradients).unwrap().dims(), [8, 16, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Shapes
/// - `x`: `[.., inputs]`
/// - `weight`: `[blocks, block, block]`, the kept blocks in the layout's order, each `[inputs, outputs]` as in the dense weight
/// - `options.bias`: `[outputs]`; `options.gates`: `[blocks]`
/// - result: `[.., outputs]`, in `options.dtype`; an output block without kept blocks equals the bias
///
/// # Errors
/// [`OpError`] if the shapes, dtypes or devices do not match each other or the layout, or the device does not support the dtype.
pub fn block_sparse_linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<3>,
    layout: &WeightLayout,
    options: BlockSparseLinearOptions,
) -> Result<Tensor<D>, OpError> {
    let dtype = check(&x, &weight, layout, &options)?;
    let weight = match options.gates {
        Some(gates) => weight * gates.reshape([layout.len(), 1, 1]),
        None => weight,
    };
    let inputs = SparseLinearInputs {
        x: x.into_dispatch(),
        weight: weight.into_dispatch(),
    };
    let call = SparseLinearCall {
        layout: layout.clone(),
        dtype,
    };
    let made = <Dispatch as BlockSparseLinearOps>::block_sparse_linear_forward(inputs, call);
    bias_activation(
        Tensor::from_dispatch(made.out),
        options.bias,
        Activation::None,
    )
}

impl BlockSparseLinearOptions {
    /// Returns the plan of [`block_sparse_linear`] for the matmuls of both passes.
    ///
    /// # Errors
    /// Those of that call.
    pub fn explain<const D: usize>(
        &self,
        x: &Tensor<D>,
        weight: &Tensor<3>,
        layout: &WeightLayout,
    ) -> Result<OpPlan, OpError> {
        let dtype = check(x, weight, layout, self)?;
        Ok(burn_blocksparse::op_plan!(&x.device(), |device| {
            let [rows, _] = matrix(&x.shape());
            backend::text(device, dtype.into(), rows, layout)
        }))
    }
}

/// Checks the arguments and returns the dtype of the product.
fn check<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<3>,
    layout: &WeightLayout,
    options: &BlockSparseLinearOptions,
) -> Result<FloatDType, OpError> {
    let device = x.device();
    served(&device)?;
    let (width, [inputs, outputs]) = (x.dims()[D - 1], [layout.inputs(), layout.outputs()]);
    blocksparse::ensure! { OpError; width == inputs => "x's last dimension", format!("{inputs}, the layout's inputs"), width; }
    let shape = weight.dims();
    OpError::expect_same("weight's shape", layout.shape(), "the layout's", shape)?;
    same_device("weight's device", &device, "x's", &weight.device())?;
    check_bias(
        options.bias.as_ref(),
        (outputs, "the layout's outputs"),
        &device,
    )?;
    if let Some(gates) = &options.gates {
        let ([length], blocks) = (gates.dims(), layout.len());
        blocksparse::ensure! { OpError; length == blocks => "gates's length", format!("{blocks}, the layout's blocks"), length; }
        OpError::expect_same("gates's dtype", weight.dtype(), "weight's", gates.dtype())?;
        same_device("gates's device", &device, "x's", &gates.device())?;
    }
    let dtype = options.dtype.unwrap_or_else(|| x.dtype().into());
    for used in [x.dtype(), dtype.into(), weight.dtype()] {
        supported("dtype", &device, used)?;
    }
    Ok(dtype)
}
