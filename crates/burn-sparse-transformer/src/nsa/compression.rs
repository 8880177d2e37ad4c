//! What makes one key or value of a block of them.

use burn::module::{Initializer, Module, Param};
use burn::nn::Linear;
use burn::tensor::{Device, Tensor};
use burn_fused_ops::{Activation, bias_activation};
use serde::{Deserialize, Serialize};

use crate::Precision;
use crate::error::Result;

/// Compression of a block of keys or values into one: φ of Yuan et al. (2025), §3.3.1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Compression {
    /// Their mean. Keys are rotated before.
    #[default]
    Mean,
    /// [`NsaCompressor`]. Keys are rotated after it, as at the last token of the block.
    Mlp,
}

/// A network that makes one key or value of the tokens of a block, the same for all heads: `gelu((x + positions) W_inner + b) W_outer + b`, of the block's
/// tokens side by side.
#[derive(Module, Debug)]
pub struct NsaCompressor {
    /// `[block, width]`: what is added to the tokens of each block, by their places in it.
    pub positions: Param<Tensor<2>>,
    /// `block · width` to `2 · width`.
    pub linear_inner: Linear,
    /// `2 · width` to `width`.
    pub linear_outer: Linear,
}

impl NsaCompressor {
    /// Of blocks of tokens so wide; `linear` makes layers of a number of inputs and outputs.
    pub(super) fn new(
        [block, width]: [usize; 2],
        linear: &dyn Fn(usize, usize) -> Linear,
        device: &Device,
    ) -> Self {
        Self {
            positions: Initializer::Zeros.init([block, width], device),
            linear_inner: linear(block * width, 2 * width),
            linear_outer: linear(2 * width, width),
        }
    }

    /// `[batch, heads, entries, block · width]` to `[batch, heads, entries, width]`.
    pub(super) fn forward(&self, windows: Tensor<4>, precision: Precision) -> Result<Tensor<4>> {
        let [batch, heads, entries, inputs] = windows.dims();
        let dtype = windows.dtype();
        let positions = self.positions.val().reshape([1, 1, inputs]).cast(dtype);
        let x = windows.reshape([batch * heads, entries, inputs]);
        let x = precision.product(&self.linear_inner, x + positions)?;
        let bias = self.linear_inner.bias.as_ref().map(Param::val);
        let x = bias_activation(x, bias, Activation::GeluErf)?;
        let x = precision.linear(&self.linear_outer, x)?.cast(dtype);
        let [.., width] = x.dims();
        Ok(x.reshape([batch, heads, entries, width]))
    }
}
