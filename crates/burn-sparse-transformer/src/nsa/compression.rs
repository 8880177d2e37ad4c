//! Compression of a block of keys or values.

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
    /// Mean. Keys are rotated before.
    #[default]
    Mean,
    /// [`NsaCompressor`]. Keys are rotated afterwards, for the position of the block's last token.
    Mlp,
}

/// Network that compresses the tokens of a block to one key or value, the same for all heads: `gelu((x + positions) W_inner + b) W_outer + b`, for the
/// concatenated tokens of the block.
#[derive(Module, Debug)]
pub struct NsaCompressor {
    /// Position embeddings within a block, `[block, width]`, added to its tokens.
    pub positions: Param<Tensor<2>>,
    /// Projection from `block · width` to `2 · width`.
    pub linear_inner: Linear,
    /// Projection from `2 · width` to `width`.
    pub linear_outer: Linear,
}

impl NsaCompressor {
    /// Creates the network for blocks `[block, width]`; `linear` creates a layer from its numbers of inputs and outputs.
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

    /// Compresses `[batch, heads, entries, block · width]` to `[batch, heads, entries, width]`.
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
