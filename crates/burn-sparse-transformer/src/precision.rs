//! Mixed precision (Micikevicius et al., 2018): the dtype of each computation.

use std::fmt;

use burn::module::Param;
use burn::nn::Linear;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_blocksparse::{OpError, ProductPrecision};
use burn_fused_ops::{
    Activation, LinearOptions, bias_activation, gated_linear, linear, out_proj, qkv_proj,
};
use serde::{Deserialize, Serialize};

use crate::TransformerError;
use crate::error::Result;

/// Dtype of the blocks' matrix products, of the attention and of the activations between them.
///
/// The attention function has its own option, [`ProductPrecision`], for its products of f32 tensors; [`Tf32`](Self::Tf32) sets it.
///
/// Parameters keep their own dtype, f32 by default, and so do gradients and the optimizer's state: a weight is rounded when it is used, and its gradient is
/// widened in the backward pass. Embeddings, the residual stream, layer norms, logits and the loss are never rounded.
///
/// bf16 has f32's exponent range, so gradients overflow or vanish only where they would in f32, and no loss scaling is needed. (f16 would need it: its
/// smallest normal number is 6e-5.)
///
/// ```
/// use burn::tensor::Device;
/// use burn_sparse_transformer::{Factorization, Pattern, Precision, SparseTransformerConfig};
///
/// let device = Device::flex();
/// let precision = match Precision::Bf16.is_supported(&device) {
///     true => Precision::Bf16,
///     false => Precision::F32,
/// };
/// let fixed = Factorization::from(Pattern::fixed(128, 32));
/// let model = SparseTransformerConfig::new(64, 4, fixed)
///     .with_vocab_size(256)
///     .with_context(512)
///     .with_n_layers(2)
///     .with_embedding_width(Some(128))
///     .with_precision(precision)
///     .init(&device);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// The parameters' dtype throughout.
    #[default]
    F32,
    /// Like [`F32`](Self::F32), but the attention's products may round their factors to tf32, with f32's exponent range and 10 bits of mantissa, for tensor
    /// cores. Only NVIDIA GPUs from Ampere on do so; elsewhere it equals [`F32`](Self::F32). It changes nothing outside the attention: on CUDA, Burn
    /// multiplies f32 matrices in tf32 with either.
    Tf32,
    /// bf16, with sums in f32.
    Bf16,
    /// Like [`Bf16`](Self::Bf16), but outside of training the attention's products of patterns may use FP8 ([`ProductPrecision::Fp8`]) on NVIDIA Hopper GPUs.
    /// Elsewhere, and in training, it equals [`Bf16`](Self::Bf16).
    Fp8,
}

impl Precision {
    /// All precisions, the most exact first.
    pub const ALL: [Self; 4] = [Self::F32, Self::Tf32, Self::Bf16, Self::Fp8];

    /// Returns its name in configurations: `f32`, `tf32`, `bf16` or `fp8`.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::Fp8 => "fp8",
        }
    }

    /// Returns whether `device` computes in this precision.
    pub fn is_supported(self, device: &Device) -> bool {
        match self {
            Precision::F32 | Precision::Tf32 => true,
            Precision::Bf16 | Precision::Fp8 => device.supports_dtype(DType::BF16),
        }
    }

    /// Returns the precision of the attention's products.
    pub(crate) fn products(self) -> ProductPrecision {
        match self {
            Precision::Tf32 => ProductPrecision::Tf32,
            Precision::Fp8 => ProductPrecision::Fp8,
            Precision::F32 | Precision::Bf16 => ProductPrecision::Full,
        }
    }

    pub(crate) fn check(self, device: &Device) -> Result<()> {
        match self.is_supported(device) {
            true => Ok(()),
            false => Err(TransformerError::Precision {
                precision: self,
                device: format!("{device:?}"),
            }),
        }
    }

    /// Returns the dtype of products of tensors of a dtype.
    pub(crate) fn dtype(self, dtype: DType) -> FloatDType {
        match self {
            Precision::F32 | Precision::Tf32 => dtype.into(),
            Precision::Bf16 | Precision::Fp8 => FloatDType::BF16,
        }
    }

    fn options(self, x: &Tensor<3>) -> LinearOptions {
        LinearOptions::default().dtype(self.dtype(x.dtype()))
    }

    /// Returns `x · W`, without the layer's bias, in the dtype of the products.
    pub(crate) fn product(self, layer: &Linear, x: Tensor<3>) -> Result<Tensor<3>, OpError> {
        let options = self.options(&x);
        linear(x, layer.weight.val(), &options)
    }

    /// Returns `f(x · gate) ∘ (x · up)` in the dtype of the products.
    pub(crate) fn gated(
        self,
        gate: &Linear,
        up: &Linear,
        x: Tensor<3>,
        activation: Activation,
    ) -> Result<Tensor<3>, OpError> {
        let options = self.options(&x);
        gated_linear(x, gate.weight.val(), up.weight.val(), activation, &options)
    }

    /// Projects to heads with several layers and their concatenated bias.
    pub(crate) fn by_heads(
        self,
        layers: &[&Linear],
        bias: Option<Tensor<1>>,
        parts: &[(usize, usize)],
        x: Tensor<3>,
    ) -> Result<Vec<Tensor<4>>, OpError> {
        let options = self.options(&x);
        let weights = layers.iter().map(|layer| layer.weight.val()).collect();
        qkv_proj(x, weights, bias, parts, &options)
    }

    /// Returns `x · W` for heads' outputs, without the layer's bias, in the dtype of the products.
    pub(crate) fn merged(self, layer: &Linear, x: Tensor<4>) -> Result<Tensor<3>, OpError> {
        let options = LinearOptions::default().dtype(self.dtype(x.dtype()));
        out_proj(x, layer.weight.val(), &options)
    }

    /// [`Self::merged`] with the layer's bias.
    pub(crate) fn merged_linear(self, layer: &Linear, x: Tensor<4>) -> Result<Tensor<3>, OpError> {
        let bias = layer.bias.as_ref().map(Param::val);
        bias_activation(self.merged(layer, x)?, bias, Activation::None)
    }

    pub(crate) fn linear(self, layer: &Linear, x: Tensor<3>) -> Result<Tensor<3>, OpError> {
        let product = self.product(layer, x)?;
        let bias = layer.bias.as_ref().map(Param::val);
        bias_activation(product, bias, Activation::None)
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Projects with `layers` and their biases to the given numbers of heads: `[batch, heads, seq, width]`.
pub(crate) fn project_heads<const N: usize>(
    precision: Precision,
    layers: [&Linear; N],
    x: Tensor<3>,
    heads: [usize; N],
) -> Result<[Tensor<4>; N]> {
    let bias_of = |layer: &Linear| match &layer.bias {
        Some(bias) => bias.val(),
        None => {
            let [_, width] = layer.weight.dims();
            Tensor::zeros([width], &layer.weight.device())
        }
    };
    let biased = layers.iter().any(|layer| layer.bias.is_some());
    let bias = biased.then(|| Tensor::cat(layers.map(bias_of).to_vec(), 0));
    let parts: [(usize, usize); N] = std::array::from_fn(|part| {
        let [_, width] = layers[part].weight.dims();
        (heads[part], width / heads[part])
    });
    let split = precision.by_heads(&layers, bias, &parts, x)?;
    Ok(split.try_into().expect("as many parts as layers"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Factorization, Pattern, SparseTransformerConfig};

    #[test]
    fn names_are_those_of_configurations() {
        for precision in Precision::ALL {
            let json = format!("\"{}\"", precision.name());
            assert_eq!(serde_json::to_string(&precision).unwrap(), json);
            let read: Precision = serde_json::from_str(&json).unwrap();
            assert_eq!(read, precision);
        }
    }

    #[test]
    fn every_blocks_attention_is_told() {
        for precision in Precision::ALL {
            let causal = Factorization::from(Pattern::causal());
            let model = SparseTransformerConfig::new(8, 2, causal)
                .with_vocab_size(7)
                .with_context(16)
                .with_n_layers(3)
                .with_embedding_width(Some(8))
                .with_block_size(8)
                .with_precision(precision)
                .init(&Device::flex());
            for block in &model.blocks {
                let told = block.mha.options.precision;
                assert_eq!(told == ProductPrecision::Tf32, precision == Precision::Tf32);
                assert_eq!(told == ProductPrecision::Fp8, precision == Precision::Fp8);
            }
        }
    }
}
