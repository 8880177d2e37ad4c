//! Attention to the keys that an indexer chooses, and the indexer's loss.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_blocksparse::AttentionOptions;
use burn_sparse_select::dsa::{Dsa, DsaIndex, DsaTarget};

use super::indexed::{Indexed, cached_keys, seen};
use super::{DsaHeadsConfig, DsaIndexer};
use crate::call::Seen;
use crate::error::Result;
use crate::heads::Positions;
use crate::linear::linear_flops;
use crate::shared_choice::{Aside, Chosen};
use crate::{SparseMhaCache, SparseMultiHeadAttentionConfig};

/// Heads of DeepSeek sparse attention: an indexer, and the number of keys it chooses for a token. Queries, keys and values are those of the layer.
#[derive(Module, Debug)]
pub struct DsaHeads {
    /// Module that scores the keys.
    pub indexer: DsaIndexer,
    #[module(skip)]
    op: Dsa,
    #[module(skip)]
    config: DsaHeadsConfig,
}

impl DsaHeads {
    pub(crate) fn new(
        config: &DsaHeadsConfig,
        mha: &SparseMultiHeadAttentionConfig,
        device: &Device,
    ) -> Result<Self> {
        config.precision(mha.precision).check(device)?;
        Ok(Self {
            indexer: DsaIndexer::new(config, mha, device)?,
            op: config.op()?,
            config: config.clone(),
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &DsaHeadsConfig {
        &self.config
    }

    #[doc(hidden)]
    pub fn op(&self) -> &Dsa {
        &self.op
    }

    /// Returns the index that chooses keys and that caches store: the given one, or its fp8 form.
    #[doc(hidden)]
    pub fn chosen_by(&self, index: DsaIndex) -> Result<DsaIndex> {
        match self.config.index_fp8 {
            true => Ok(index.in_fp8()?),
            false => Ok(index),
        }
    }
}

impl Indexed for DsaHeads {
    type Index = DsaIndex;

    fn index(&self, x: Tensor<3>, positions: &Positions) -> Result<DsaIndex> {
        self.indexer.index(x, positions)
    }

    fn behind(&self, index: DsaIndex, cache: &mut SparseMhaCache) -> Result<DsaIndex> {
        let index = self.chosen_by(index)?;
        let keys = cached_keys(cache, &index.k)?;
        Ok(index.with_keys(keys)?)
    }

    fn attend(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        index: DsaIndex,
        options: &AttentionOptions,
        learns: bool,
    ) -> Result<Seen> {
        let [.., seq_kv, _] = index.k.dims();
        let lists = match seq_kv > self.config.keep {
            true => self.op.choose(&self.chosen_by(index.clone())?)?,
            // All keys are kept; rounding would change nothing.
            false => self.op.choose(&index)?,
        };
        let aux_loss = match learns {
            true => {
                let over = DsaTarget::Chosen(&lists);
                Some(self.op.loss(&index, [&q, &k], options.scale, over)?)
            }
            false => None,
        };
        let options = options.clone().dispatch_mode(self.config.dispatch_mode());
        let choice = Chosen::Keys(lists.clone(), options.dispatch_mode);
        Ok(Seen {
            heads: self.op.attention(q, k, v, lists, options)?,
            aside: Aside {
                aux_loss,
                choice: Some(choice.into()),
            },
        })
    }

    fn warm_up_loss(
        &self,
        (x, positions): (Tensor<3>, &Positions),
        pair: [&Tensor<4>; 2],
        scale: Option<f64>,
    ) -> Result<Tensor<1>> {
        let index = self.indexer.index(x, positions)?;
        Ok(self.op.loss(&index, pair, scale, DsaTarget::All)?)
    }

    fn layer_flops(&self) -> u64 {
        self.indexer.layers().map(linear_flops).iter().sum()
    }

    fn choice_flops(&self, seq: usize) -> u64 {
        let scores = match self.op.blocks() {
            _ if seq <= self.config.keep => 0,
            Some([blocks, block]) if seq > blocks.saturating_mul(block) => {
                // Means of earlier blocks, and the keys of the chosen ones.
                let of_query =
                    |at: usize| at / block + (at / block).min(blocks - 1) * block + at % block + 1;
                (0..seq).map(of_query).sum::<usize>() as u64
            }
            _ => seen(seq, seq),
        };
        2 * (self.config.index_heads * self.config.index_dim) as u64 * scores
    }
}
