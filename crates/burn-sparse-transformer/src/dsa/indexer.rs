//! What an indexer makes of tokens.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, RotaryEncoding};
use burn::tensor::{Device, Tensor};
use burn_blocksparse::DsaIndex;

use super::DsaHeadsConfig;
use crate::TransformerError;
use crate::heads::{Positions, rotate};

/// The lightning indexer: what it makes of tokens, in its parameters' dtype. Tokens are detached, so that the indexer learns nothing by the model's loss, and
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
}

impl DsaIndexer {
    /// `linear` makes layers without bias of a number of inputs and outputs.
    pub(super) fn new(
        config: &DsaHeadsConfig,
        d_model: usize,
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
        }
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
        let x = x.detach().cast(self.query.weight.val().dtype());
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
        let q = self.query.forward(x.clone());
        let width = q.dims()[2] / self.heads;
        let q = q.reshape([batch, seq, self.heads, width]).swap_dims(1, 2);
        let k = self.norm.forward(self.key.forward(x.clone()));
        let k = k.reshape([batch, 1, seq, width]);
        let weights = self.weights.forward(x).swap_dims(1, 2);
        Ok(DsaIndex::new(rotated(q)?, rotated(k)?, weights)?)
    }
}
