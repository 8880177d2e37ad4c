//! Encoder layer: burn-nn's, on the training ops.

use burn::module::Module;
use burn::nn::activation::Activation as DenseActivation;
use burn::nn::transformer::{PositionWiseFeedForward, TransformerEncoderLayer};
use burn::nn::{Dropout, LayerNorm, Linear};
use burn::tensor::Tensor;
use burn_fused_ops::{
    Activation, ElementDropout, MlpOptions, MlpParams, bias_activation, dropout, mlp,
};

use crate::block::Pass;
use crate::dropout::{Seeds, dropped};
use crate::error::{Result, ensure};
use crate::layouts::Layouts;
use crate::stream::{Projected, Stream};
use crate::{Precision, SparseMhaInput, SparseMultiHeadAttention};

/// Layer of [`SparseTransformerEncoder`](crate::SparseTransformerEncoder). As in burn-nn, `norm_2` belongs to the attention with `norm_first`, and to the
/// feed-forward network without it.
#[derive(Module, Debug)]
pub struct SparseTransformerEncoderLayer {
    /// Self-attention.
    pub mha: SparseMultiHeadAttention,
    /// Position-wise feed-forward network.
    pub pwff: PositionWiseFeedForward,
    /// Norm after the attention, or before the feed-forward network.
    pub norm_1: LayerNorm,
    /// Norm after the feed-forward network, or before the attention.
    pub norm_2: LayerNorm,
    /// Dropout at the end of both residual branches.
    pub dropout: Dropout,
    /// True for pre-norm, false for post-norm.
    pub norm_first: bool,
    #[module(skip)]
    epsilons: [f64; 2],
    #[module(skip)]
    precision: Precision,
    #[module(skip)]
    seeds: Seeds,
}

impl SparseTransformerEncoderLayer {
    pub(crate) fn from_dense(layer: &TransformerEncoderLayer, layouts: Layouts) -> Result<Self> {
        Ok(Self {
            mha: SparseMultiHeadAttention::from_dense_with(&layer.mha, layouts)?,
            pwff: layer.pwff.clone(),
            norm_1: layer.norm_1.clone(),
            norm_2: layer.norm_2.clone(),
            dropout: layer.dropout.clone(),
            norm_first: layer.norm_first,
            epsilons: [epsilon(&layer.norm_1)?, epsilon(&layer.norm_2)?],
            precision: Precision::default(),
            seeds: Seeds::default(),
        })
    }

    pub(crate) fn set_precision(&mut self, precision: Precision) {
        self.precision = precision;
        self.mha.precision = precision;
    }

    pub(crate) fn residual(
        &self,
        stream: Stream,
        attend: impl FnOnce(SparseMhaInput) -> Result<Projected>,
    ) -> Result<Stream> {
        let x = stream.x();
        self.mha.check_input("x", x)?;
        let seed = x.is_autodiff().then(|| self.seeds.next());
        let drops = seed.map_or_else(Pass::default, |seed| {
            Pass::new(&self.mha, &self.dropout, seed)
        });
        let inner = seed.zip(dropped(&self.pwff.dropout));
        let inner = inner.map(|(seed, of)| ElementDropout::new(of, seed, INNER));
        let attend = |x: Tensor<3>| {
            let mut input = SparseMhaInput::self_attn(x);
            input.options.dropout = drops.attention.dropout;
            attend(input)
        };
        let own = x.dtype().into();
        let [first, second] = self.epsilons;
        if self.norm_first {
            let dtype = self.precision.dtype(x.dtype());
            let (stream, normed) = stream.norm(&self.norm_2, second, dtype)?;
            let stream = stream.push(attend(normed)?, drops.branch(ATTENTION))?;
            let (stream, normed) = stream.norm(&self.norm_1, first, dtype)?;
            let branch = self.feed_forward(normed, inner)?;
            return stream.push(branch, drops.branch(FEED_FORWARD));
        }
        // With post-norm, the normed sum becomes the stream.
        let x = stream.finish()?;
        let stream = Stream::new(x.clone()).push(attend(x)?, drops.branch(ATTENTION))?;
        let (_, x) = stream.norm(&self.norm_1, first, own)?;
        let branch = self.feed_forward(x.clone(), inner)?;
        let stream = Stream::new(x).push(branch, drops.branch(FEED_FORWARD))?;
        let (_, x) = stream.norm(&self.norm_2, second, own)?;
        Ok(Stream::new(x))
    }

    /// Applies the network without its last bias; `drop` is the dropout inside.
    fn feed_forward(&self, x: Tensor<3>, drop: Option<ElementDropout>) -> Result<Projected> {
        let (linear_inner, linear_outer) = (&self.pwff.linear_inner, &self.pwff.linear_outer);
        let activation = &self.pwff.activation;
        let bias = |layer: &Linear| layer.bias.as_ref().map(|bias| bias.val());
        let x = match (ours(activation), drop) {
            (Some(activation), None) => {
                let mut params =
                    MlpParams::new(linear_inner.weight.val(), linear_outer.weight.val());
                params.bias = bias(linear_inner);
                let options = MlpOptions::default().dtype(self.precision.dtype(x.dtype()));
                mlp(x, params, activation, &options)?
            }
            (activation_of, drop) => {
                let x = match activation_of {
                    Some(activation) => {
                        let x = self.precision.product(linear_inner, x)?;
                        bias_activation(x, bias(linear_inner), activation)?
                    }
                    None => activation.forward(self.precision.linear(linear_inner, x)?),
                };
                let x = match drop {
                    Some(drop) => dropout(x, &drop)?,
                    None => x,
                };
                self.precision.product(linear_outer, x)?
            }
        };
        Ok(Projected::new(x, bias(linear_outer)))
    }
}

/// Sites of a layer's dropouts.
const ATTENTION: u32 = 0;
const FEED_FORWARD: u32 = 1;
const INNER: u32 = 2;

/// Returns the equivalent activation of the training ops, if there is one.
fn ours(activation: &DenseActivation) -> Option<Activation> {
    match activation {
        DenseActivation::Identity(_) => Some(Activation::None),
        DenseActivation::Gelu(gelu) if gelu.approximate => Some(Activation::GeluTanh),
        DenseActivation::Gelu(_) => Some(Activation::GeluErf),
        DenseActivation::Relu(_) => Some(Activation::Relu),
        _ => None,
    }
}

/// Returns the epsilon of a burn-nn norm. The field is private, but the norm's display text contains it.
fn epsilon(norm: &LayerNorm) -> Result<f64> {
    let text = norm.to_string();
    let number = text.split_once("epsilon: ").and_then(|(_, rest)| {
        let end = rest.find([',', '\n', '}']).unwrap_or(rest.len());
        rest[..end].trim().parse().ok()
    });
    ensure! { number.is_some() => "a layer norm", "burn-nn's, which prints its epsilon", &text; }
    Ok(number.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::nn::LayerNormConfig;
    use burn::tensor::Device;

    #[test]
    fn epsilons_are_those_that_were_set() {
        for expected in [1e-12, 1e-5, 0.1, 3.0, 1.234_567_890_123e-7] {
            let config = LayerNormConfig::new(4).with_epsilon(expected);
            let norm = config.init(&Device::flex());
            assert_eq!(epsilon(&norm).unwrap(), expected);
        }
    }
}
