//! Linear layers in mixed precision, and with block-sparse weights.

mod block_sparse;
mod kept_blocks;

pub(crate) use block_sparse::fans;
pub use block_sparse::{BlockSparseLinear, BlockSparseLinearConfig};
pub use burn_fused_ops::sparse_linear::{WeightLayout, WeightPattern};
#[cfg(feature = "store")]
pub(crate) use kept_blocks::fnv;

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fused_ops::{Activation, LinearOptions, bias_activation, linear};

use crate::Precision;
use crate::error::{Result, or_panics};

/// Configuration of [`MixedPrecisionLinear`].
#[derive(Config, Debug)]
#[must_use = "a configuration does nothing until `init`"]
pub struct MixedPrecisionLinearConfig {
    /// Sizes, bias and initialisation, as in burn-nn.
    pub linear: LinearConfig,
    /// Dtype of the product.
    #[config(default = "Precision::F32")]
    pub precision: Precision,
}

impl MixedPrecisionLinearConfig {
    or_panics! {
        /// Creates the layer, initialised like burn-nn's.
        pub fn init(&self, device: &Device) -> MixedPrecisionLinear;

        /// # Errors
        /// [`TransformerError::Precision`](crate::TransformerError::Precision) if the device does not support the precision.
        pub fn try_init { MixedPrecisionLinear::from_dense(&self.linear.init(device)).with_precision(self.precision) }
    }
}

/// burn-nn's `Linear` with its product in another precision: `x · W + b`. Weights keep their own dtype, f32 by default, and are rounded when they are used;
/// their gradients are summed in f32. The parameters have burn-nn's names, so records load both ways.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_sparse_transformer::Precision;
/// use burn_sparse_transformer::linear::MixedPrecisionLinear;
///
/// let device = Device::flex();
/// let trained = LinearConfig::new(8, 4).init(&device);
/// let layer = MixedPrecisionLinear::from_dense(&trained).with_precision(Precision::Bf16)?;
/// let x = Tensor::<3>::random([2, 5, 8], Distribution::Default, &device);
/// assert_eq!(layer.forward(x).dims(), [2, 5, 4]);
/// # Ok::<(), burn_sparse_transformer::TransformerError>(())
/// ```
#[derive(Module, Debug)]
pub struct MixedPrecisionLinear {
    /// Weight, `[d_input, d_output]`.
    pub weight: Param<Tensor<2>>,
    /// Bias, `[d_output]`.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    precision: Precision,
}

impl MixedPrecisionLinear {
    /// Returns a layer that shares the parameters of `layer`.
    #[must_use]
    pub fn from_dense(layer: &Linear) -> Self {
        Self {
            weight: layer.weight.clone(),
            bias: layer.bias.clone(),
            precision: Precision::default(),
        }
    }

    /// Returns the same layer with its product in another precision.
    ///
    /// # Errors
    /// [`TransformerError::Precision`](crate::TransformerError::Precision) if the weight's device does not support it.
    pub fn with_precision(mut self, precision: Precision) -> Result<Self> {
        precision.check(&self.weight.lazy_device())?;
        self.precision = precision;
        Ok(self)
    }

    or_panics! {
        /// Applies the layer. The result has the input's dtype.
        ///
        /// # Shapes
        /// - input: `[.., d_input]`
        /// - output: `[.., d_output]`
        pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D>;

        /// # Errors
        /// If the last axis is not `d_input`.
        pub fn try_forward {
            let dtype = x.dtype();
            let options = LinearOptions::default().dtype(self.precision.dtype(dtype));
            let product = linear(x, self.weight.val(), &options)?;
            let bias = self.bias.as_ref().map(Param::val);
            Ok(bias_activation(product, bias, Activation::None)?.cast(dtype))
        }
    }
}

pub(crate) fn linear_flops(linear: &Linear) -> u64 {
    2 * linear.weight.lazy_shape().num_elements() as u64
}
