//! Index branch, attention to the blocks it chooses, and its loss.

use burn::module::Module;
use burn::nn::{Linear, RmsNorm, RmsNormConfig, RotaryEncoding};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_blocksparse::AttentionOptions;
use burn_fused_ops::{AddNormOptions, NormKind, NormParams, norm};
use burn_sparse_select::msa::{Msa, MsaIndex, MsaTarget};

use super::MsaHeadsConfig;
use crate::call::Seen;
use crate::dsa::indexed::{Indexed, cached_keys, rotated, seen};
use crate::error::Result;
use crate::heads::{Positions, rotate_first};
use crate::linear::linear_flops;
use crate::shared_choice::{Aside, Chosen};
use crate::{Precision, SparseMhaCache, SparseMultiHeadAttentionConfig, TransformerError};

/// Heads of MiniMax sparse attention: an index branch, which chooses blocks for each token. Queries, keys and values are those of the layer. Tokens are
/// detached: the branch learns by its own loss only, and the model by its own.
#[derive(Module, Debug)]
pub struct MsaHeads {
    /// Projection from `d_model` to `n_kv_heads · index_dim`, without bias.
    pub query: Linear,
    /// Projection from `d_model` to `index_dim`, without bias.
    pub key: Linear,
    /// Norm of each query head.
    pub query_norm: RmsNorm,
    /// Norm of keys.
    pub key_norm: RmsNorm,
    /// Rotation of the first channels of queries and keys; no parameters.
    pub rope: Option<RotaryEncoding>,
    #[module(skip)]
    op: Msa,
    #[module(skip)]
    config: MsaHeadsConfig,
    #[module(skip)]
    precision: Precision,
}

impl MsaHeads {
    pub(crate) fn new(
        config: &MsaHeadsConfig,
        mha: &SparseMultiHeadAttentionConfig,
        device: &Device,
    ) -> Result<Self> {
        let n_kv_heads = mha.n_kv_heads.unwrap_or(mha.n_heads);
        let width = config.index_dim;
        let norm = || RmsNormConfig::new(width).init(device);
        Ok(Self {
            query: mha.index_linear(n_kv_heads * width, device),
            key: mha.index_linear(width, device),
            query_norm: norm(),
            key_norm: norm(),
            rope: mha.index_rope(rotated(config.rope_dim, width)?, device)?,
            op: config.op()?,
            config: config.clone(),
            precision: mha.precision,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &MsaHeadsConfig {
        &self.config
    }

    /// Returns the dtype of the index branch's queries and keys.
    pub fn dtype(&self) -> FloatDType {
        self.precision.dtype(self.query.weight.val().dtype())
    }

    #[doc(hidden)]
    pub fn op(&self) -> &Msa {
        &self.op
    }

    pub(crate) fn layers_mut(&mut self) -> [&mut Linear; 2] {
        [&mut self.query, &mut self.key]
    }
}

impl Indexed for MsaHeads {
    type Index = MsaIndex;

    fn index(&self, x: Tensor<3>, positions: &Positions) -> Result<MsaIndex> {
        let [_, width] = self.key.weight.val().dims();
        let [_, queries] = self.query.weight.val().dims();
        let parts = [(queries / width, width), (1, width)];
        let layers = [&self.query, &self.key];
        let heads = (self.precision).by_heads(&layers, None, &parts, x.detach())?;
        let norms = [&self.query_norm, &self.key_norm];
        let mut placed = heads.into_iter().zip(norms).map(|(x, own)| {
            let gamma = own.gamma.val();
            let options = AddNormOptions::default()
                .norm(NormKind::Rms)
                .epsilon(own.epsilon)
                .dtype(gamma.dtype().into());
            let x = norm(x, NormParams::new(gamma), &options)?;
            let x = rotate_first(&self.rope, x, positions)?;
            Ok::<_, TransformerError>(x.cast(DType::from(self.dtype())))
        });
        let mut next = || placed.next().expect("there are queries and keys");
        Ok(MsaIndex::new(next()?, next()?)?)
    }

    fn behind(&self, index: MsaIndex, cache: &mut SparseMhaCache) -> Result<MsaIndex> {
        let keys = cached_keys(cache, &index.k)?;
        Ok(index.with_keys(keys)?)
    }

    fn attend(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        index: MsaIndex,
        options: &AttentionOptions,
        learns: bool,
    ) -> Result<Seen> {
        let lists = self.op.choose(&index)?;
        let (of_q, of_k) = (q.clone(), k.clone());
        let (heads, lse) = (self.op).attention(q, k, v, lists.clone(), options.clone())?;
        let aux_loss = match learns {
            true => {
                let over = MsaTarget::Chosen {
                    lists: lists.as_ref(),
                    lse: &lse,
                };
                Some((self.op).loss(&index, [&of_q, &of_k], options.scale, over)?)
            }
            false => None,
        };
        Ok(Seen {
            heads,
            aside: Aside {
                aux_loss,
                choice: Some(Chosen::Indexed(self.op.clone(), lists).into()),
            },
        })
    }

    fn warm_up_loss(
        &self,
        (x, positions): (Tensor<3>, &Positions),
        pair: [&Tensor<4>; 2],
        scale: Option<f64>,
    ) -> Result<Tensor<1>> {
        let index = self.index(x, positions)?;
        Ok(self.op.loss(&index, pair, scale, MsaTarget::All)?)
    }

    fn layer_flops(&self) -> u64 {
        [&self.query, &self.key].map(linear_flops).iter().sum()
    }

    fn choice_flops(&self, seq: usize) -> u64 {
        let [_, queries] = self.query.weight.val().dims();
        match seq.div_ceil(self.config.block) > self.config.keep {
            true => 2 * queries as u64 * seen(seq, seq),
            false => 0,
        }
    }
}
