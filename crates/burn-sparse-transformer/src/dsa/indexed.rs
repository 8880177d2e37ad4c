//! What layers have in common whose keys an indexer chooses: the stages of its training, its keys in caches, and their place instead of a pattern.

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

/// Heads whose keys an indexer chooses.
pub trait Indexed {
    /// What it makes of tokens.
    type Index;

    /// Of tokens `[batch, seq, d_model]`, which are detached.
    fn index(&self, x: Tensor<3>, positions: &Positions) -> Result<Self::Index>;

    /// With the keys of a cache before its own, which go there.
    fn behind(&self, index: Self::Index, cache: &mut SparseMhaCache) -> Result<Self::Index>;

    /// What heads see of the keys that are chosen; if the indexer `learns`, also what it learns by: the loss over them.
    fn attend(
        &self,
        heads: [Tensor<4>; 3],
        index: Self::Index,
        options: &AttentionOptions,
        learns: bool,
    ) -> Result<Seen>;

    /// What the indexer learns by in its warm-up: the loss of tokens over all keys, against dense attention of these queries and keys.
    fn warm_up_loss(
        &self,
        tokens: (Tensor<3>, &Positions),
        pair: [&Tensor<4>; 2],
        scale: Option<f64>,
    ) -> Result<Tensor<1>>;

    /// Operations of the indexer's projections for one position, forward.
    fn layer_flops(&self) -> u64;

    /// Operations of the indexer's scores for one sequence, forward: none where there is nothing to choose.
    fn choice_flops(&self, seq: usize) -> u64;
}

/// What the layer's heads see, and what the indexer learns by, in a stage of its training.
pub(crate) fn context<H: Indexed>(
    heads: &H,
    stage: DsaStage,
    mha: &SparseMultiHeadAttention,
    input: SparseMhaInput,
    mut cache: Option<&mut SparseMhaCache>,
) -> Result<(Seen, Call)> {
    let before = cache.as_ref().map_or(0, |cache| cache.len());
    let (call, request) = mha.prepare(&input, before)?;
    // Nothing is learned from a cache.
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

/// Pairs of a sequence whose tokens see so many of the tokens up to their own, at most.
pub(crate) fn seen(seq: usize, most: usize) -> u64 {
    (1..=seq).map(|keys| keys.min(most) as u64).sum()
}

/// The keys of an indexer after those of a cache, which must have room for them.
pub(crate) fn cached_keys(cache: &mut SparseMhaCache, k: &Tensor<4>) -> Result<Tensor<4>> {
    let (before, known) = (cache.len(), cache.index().len());
    ensure! { before == known =>
    "cache", format!("one whose {before} tokens an indexer has seen"), format!("one of {known}"); }
    let [batch, _, new, width] = k.dims();
    cache.index().check([batch, 1, width], new)?;
    // Of an indexer there are no values.
    let no_values = k.clone().narrow(3, 0, 1);
    let [keys, _] = cache.index().append([k.clone(), no_values]);
    Ok(keys)
}

/// How many first channels of a width an indexer rotates: half of them, if it does not say.
pub(crate) fn rotated(rope_dim: Option<usize>, width: usize) -> Result<usize> {
    let rotated = rope_dim.unwrap_or(width / 4 * 2);
    let fits = rotated <= width && rotated.is_multiple_of(2);
    ensure! { fits =>
    "rope_dim", format!("an even number, at most {width}, the width of an index head"), rotated; }
    Ok(rotated)
}

/// That tokens see all earlier ones, from which an indexer chooses.
pub(crate) fn check_pattern(name: &str, pattern: &Pattern) -> Result<()> {
    ensure! { *pattern == Pattern::causal() =>
    "pattern", format!("causal with {name}, whose tokens choose from all earlier ones"), pattern; }
    Ok(())
}

impl SparseMultiHeadAttentionConfig {
    /// The rotations of an indexer's first channels beside those of the attention.
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
