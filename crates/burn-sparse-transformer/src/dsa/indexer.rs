//! What an indexer makes of tokens.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, RotaryEncoding};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_blocksparse::DsaIndex;

use super::DsaHeadsConfig;
use crate::heads::{Positions, rotate};
use crate::{Precision, TransformerError};

/// The lightning indexer: what it makes of tokens, queries and keys in a precision ([`DsaHeadsConfig::index_precision`]), weights in the dtype of their layer's
/// parameters. Tokens are detached, so that the indexer learns nothing by the model's loss, and
/// the model nothing by the indexer's.
#[derive(Module, Debug)]
pub struct DsaIndexer {
    /// `d_model` to `index_heads · index_dim`, without bias.
    pub query: Linear,
    /// `d_model` to `index_dim`, without bias.
    pub key: Linear,
    /// Of keys.
    pub norm: LayerNorm,
    /// `d_model` to `index_heads`, without bias.
    pub weights: Linear,
    /// Of the first channels of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    heads: usize,
    #[module(skip)]
    precision: Precision,
}

impl DsaIndexer {
    /// `linear` makes layers without bias of a number of inputs and outputs; `precision` is the attention's.
    pub(super) fn new(
        config: &DsaHeadsConfig,
        d_model: usize,
        precision: Precision,
        rope: Option<RotaryEncoding>,
        linear: &dyn Fn(usize, usize) -> Linear,
        device: &Device,
    ) -> Self {
        let DsaHeadsConfig {
            index_heads: heads,
            index_dim: width,
            ..
        } = *config;
        Self {
            query: linear(d_model, heads * width),
            key: linear(d_model, width),
            norm: LayerNormConfig::new(width).init(device),
            weights: linear(d_model, heads),
            rope,
            heads,
            precision: config.precision(precision),
        }
    }

    /// The dtype of the index.
    pub(crate) fn dtype(&self) -> FloatDType {
        self.precision.dtype(self.query.weight.val().dtype())
    }

    pub(crate) fn layers(&self) -> [&Linear; 3] {
        [&self.query, &self.key, &self.weights]
    }

    /// All layers, for another initialisation.
    pub(crate) fn layers_mut(&mut self) -> [&mut Linear; 3] {
        [&mut self.query, &mut self.key, &mut self.weights]
    }

    /// Queries, keys and weights of tokens `[batch, seq, d_model]` at these positions.
    pub(super) fn index(
        &self,
        x: Tensor<3>,
        positions: &Positions,
    ) -> Result<DsaIndex, TransformerError> {
        let own = self.query.weight.val().dtype();
        let dtype = DType::from(self.dtype());
        let tokens = x.detach();
        let x = tokens.clone().cast(own);
        let [batch, seq, _] = x.dims();
        let rotated = |x: Tensor<4>| match &self.rope {
            None => Ok(x),
            Some(rope) => {
                let [.., width] = x.dims();
                let [_, turned, _] = rope.freq_complex.dims();
                let first = rotate(rope, x.clone().narrow(3, 0, turned), positions)?;
                let first = first.cast(x.dtype());
                Ok::<_, TransformerError>(match turned == width {
                    true => first,
                    false => Tensor::cat(vec![first, x.narrow(3, turned, width - turned)], 3),
                })
            }
        };
        let [_, outputs] = self.query.weight.val().dims();
        let width = outputs / self.heads;
        let (q, k) = match dtype == own {
            true => {
                let q = self.query.forward(x.clone());
                let q = q.reshape([batch, seq, self.heads, width]).swap_dims(1, 2);
                (q, self.key.forward(x.clone()))
            }
            // Rounded as the attention's products are; keys are normalised in the parameters' dtype.
            false => {
                let parts = [(self.heads, width)];
                let q = (self.precision).by_heads(&[&self.query], None, &parts, tokens.clone())?;
                let q = q.into_iter().next().expect("there is a part");
                (q, self.precision.product(&self.key, tokens)?.cast(own))
            }
        };
        let k = self.norm.forward(k);
        let k = rotated(k.reshape([batch, 1, seq, width]))?;
        let weights = self.weights.forward(x).swap_dims(1, 2);
        Ok(DsaIndex::new(rotated(q)?, k.cast(dtype), weights)?)
    }
}
