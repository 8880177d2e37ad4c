//! Common parts of layers with an indexer: stages of its training, its keys in caches, and its role in place of a pattern.

use burn::nn::{Linear, LinearConfig, RotaryEncoding};
use burn::tensor::{Device, Tensor};
use burn_blocksparse::{AttentionOptions, Pattern};

use super::DsaStage;
use crate::call::{Call, Seen};
use crate::error::{Result, ensure};
use crate::heads::{Positions, validate_rope};
use crate::kind::appended;
use crate::{
    SparseMhaCache, SparseMhaInput, SparseMultiHeadAttention, SparseMultiHeadAttentionConfig,
};

/// Heads whose keys are chosen by an indexer.
pub trait Indexed {
    /// Queries, keys and weights that the indexer computes from tokens.
    type Index;

    /// Computes the index of tokens `[batch, seq, d_model]`, which are detached.
    fn index(&self, x: Tensor<3>, positions: &Positions) -> Result<Self::Index>;

    /// Appends the index's keys to a cache, and returns the index with all keys of the cache.
    fn behind(&self, index: Self::Index, cache: &mut SparseMhaCache) -> Result<Self::Index>;

    /// Computes attention to the chosen keys; if the indexer `learns`, also its loss over them.
    fn attend(
        &self,
        heads: [Tensor<4>; 3],
        index: Self::Index,
        options: &AttentionOptions,
        learns: bool,
    ) -> Result<Seen>;

    /// Returns the indexer's loss in its warm-up: over all keys, against dense attention of these queries and keys.
    fn warm_up_loss(
        &self,
        tokens: (Tensor<3>, &Positions),
        pair: [&Tensor<4>; 2],
        scale: Option<f64>,
    ) -> Result<Tensor<1>>;

    /// Returns the operations of the indexer's projections for one position, forward.
    fn layer_flops(&self) -> u64;

    /// Returns the operations of the indexer's scores for one sequence, forward: 0 if it keeps all keys.
    fn choice_flops(&self, seq: usize) -> u64;
}

/// Computes the heads' outputs and the indexer's loss, in a stage of its training.
pub(crate) fn context<H: Indexed>(
    heads: &H,
    stage: DsaStage,
    mha: &SparseMultiHeadAttention,
    input: SparseMhaInput,
    mut cache: Option<&mut SparseMhaCache>,
) -> Result<(Seen, Call)> {
    let before = cache.as_ref().map_or(0, |cache| cache.len());
    let (call, request) = mha.prepare(&input, before)?;
    // There is no loss with a cache.
    let learns = input.query.is_autodiff() && cache.is_none();
    let x = input.query.clone();
    let own = mha.project(input, &call)?;
    if stage == DsaStage::Sparse {
        let mut index = heads.index(x, &call.key)?;
        if let Some(cache) = &mut cache {
            index = heads.behind(index, cache)?;
        }
        let seen = heads.attend(appended(cache, own), index, &mha.options, learns)?;
        return Ok((seen, call));
    }
    let aux_loss = match learns && stage == DsaStage::WarmUp {
        true => Some(heads.warm_up_loss((x, &call.key), [&own[0], &own[1]], mha.options.scale)?),
        false => None,
    };
    let seen = mha.attend(appended(cache, own), &mha.layouts.get(&request)?, &call)?;
    let mut seen = Seen::from(seen);
    seen.aside.aux_loss = aux_loss;
    Ok((seen, call))
}

/// Counts the pairs of a sequence in which each token sees at most `most` of the tokens up to its own.
pub(crate) fn seen(seq: usize, most: usize) -> u64 {
    (1..=seq).map(|keys| keys.min(most) as u64).sum()
}

/// Appends an indexer's keys to those of a cache, which must have capacity for them.
pub(crate) fn cached_keys(cache: &mut SparseMhaCache, k: &Tensor<4>) -> Result<Tensor<4>> {
    let (before, known) = (cache.len(), cache.index().len());
    ensure! { before == known =>
    "cache", format!("one whose {before} tokens an indexer has seen"), format!("one of {known}"); }
    let [batch, _, new, width] = k.dims();
    cache.index().check([batch, 1, width], new)?;
    // An indexer has no values.
    let no_values = k.clone().narrow(3, 0, 1);
    let [keys, _] = cache.index().append([k.clone(), no_values]);
    Ok(keys)
}

/// Returns the number of first channels that an indexer rotates: half of the width by default.
pub(crate) fn rotated(rope_dim: Option<usize>, width: usize) -> Result<usize> {
    let rotated = rope_dim.unwrap_or(width / 4 * 2);
    let fits = rotated <= width && rotated.is_multiple_of(2);
    ensure! { fits =>
    "rope_dim", format!("an even number, at most {width}, the width of an index head"), rotated; }
    Ok(rotated)
}

/// Checks that tokens see all earlier ones, from which an indexer chooses.
pub(crate) fn check_pattern(name: &str, pattern: &Pattern) -> Result<()> {
    ensure! { *pattern == Pattern::causal() =>
    "pattern", format!("causal with {name}, whose tokens choose from all earlier ones"), pattern; }
    Ok(())
}

impl SparseMultiHeadAttentionConfig {
    /// Returns the rotation table of an indexer's first channels, if the attention has one.
    pub(crate) fn index_rope(
        &self,
        rotated: usize,
        device: &Device,
    ) -> Result<Option<RotaryEncoding>> {
        let Some(config) = self.rope.as_ref().filter(|_| rotated > 0) else {
            return Ok(None);
        };
        let mut config = config.clone();
        config.d_model = rotated;
        validate_rope(&config, rotated)?;
        Ok(Some(config.init(device)))
    }

    pub(crate) fn index_linear(&self, d_output: usize, device: &Device) -> Linear {
        LinearConfig::new(self.d_model, d_output)
            .with_bias(false)
            .with_initializer(self.initializer.clone())
            .init(device)
    }
}
