//! Conversion of a run's configuration and records to Burn modules.

use std::f64::consts::LN_2;

use anyhow::{Context, Result, anyhow, bail};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, Device, Int, Tensor};
use burn_blocksparse::Pattern;
use burn_fused_ops::optim::{FusedAdamW, FusedAdamWConfig};
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::feed_forward::FeedForwardSparsity;
use burn_sparse_transformer::{
    Factorization, Selection, SparseTransformer, SparseTransformerConfig,
};

use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::images::format::{CHANNELS, Pictures};
use crate::indexers;
use crate::presets::{FactorizationKind, ModelConfig, Recipe};
use crate::progress::say;
use crate::prune::prune;

/// Every byte is a token. For images each class is one, too.
const BYTES: usize = 256;

/// Reads a tensor's elements to the host.
pub fn numbers<const D: usize>(x: Tensor<D>) -> Result<Vec<f32>> {
    (x.try_into_vec_as()).map_err(|error| anyhow!("{error:?}"))
}

/// Reads a matrix's rows to the host.
pub fn rows(x: Tensor<2>) -> Result<Vec<Vec<f32>>> {
    let [_, width] = x.dims();
    Ok(numbers(x)?.chunks(width).map(<[f32]>::to_vec).collect())
}

/// Creates a model with random weights that depend on `seed` only.
pub fn new(config: &ModelConfig, seed: u64, device: &Device) -> Result<SparseTransformer> {
    device.seed(seed);
    let model = transformer(config)?
        .try_init(device)?
        // Draws the weights here, in order, not on first use.
        .materialize();
    let model = choosing(model, config)?;
    // Burn draws parameter ids at random; counted ids make two models of one seed bitwise equal.
    Ok(model.map(&mut CountedIds(0)))
}

/// Returns the configuration of the layers.
pub fn transformer(config: &ModelConfig) -> Result<SparseTransformerConfig> {
    Ok(
        SparseTransformerConfig::new(config.d_model, config.heads, factorization(config)?)
            .with_vocab_size(config.pictures.map_or(BYTES, Pictures::vocabulary))
            .with_context(config.context)
            .with_n_layers(config.layers)
            .with_embedding_width(Some(config.position_width))
            .with_block_size(config.block_size)
            .with_dropout(config.dropout)
            .with_init_scale(config.init_scale)
            .with_precision(config.precision)
            .with_d_ff(config.d_ff)
            .with_d_key(config.d_key)
            .with_softmax_threshold(config.softmax_threshold)
            .with_embedding_channels(config.pictures.map(|_| CHANNELS))
            .with_selections((!config.selections.is_empty()).then(|| config.selections.clone()))
            .with_full_last_layers(Some(config.full_last_layers))
            .with_share_every(config.share_every)
            .with_content(config.content.clone())
            .with_n_kv_heads(config.kv_heads)
            .with_local_heads((!config.local_heads.is_empty()).then(|| config.local_heads.clone()))
            .with_feed_forward_sparsity(config.ff_weights.map(|weights| {
                FeedForwardSparsity::new(weights.density)
                    .with_block(weights.block)
                    .with_pattern(weights.layout)
            })),
    )
}

/// Applies the configuration's selections per head, if any.
fn choosing(model: SparseTransformer, config: &ModelConfig) -> Result<SparseTransformer> {
    if config.head_selections.is_empty() {
        return Ok(model);
    }
    let layers = config.head_selections.iter().cloned().map(Some).collect();
    (model.with_head_selections(layers)).context("--selection-file")
}

/// Returns the distinct selections of heads, `None` for the pattern, and the number of heads of each.
pub fn ways_of_heads(config: &ModelConfig) -> Vec<(Option<&Selection>, usize)> {
    let mut found: Vec<(Option<&Selection>, usize)> = Vec::new();
    for layer in &config.head_selections {
        for head in 0..layer.len() {
            let own = layer.of(head);
            match found.iter_mut().find(|(known, _)| *known == own) {
                Some((_, count)) => *count += 1,
                None => found.push((own, 1)),
            }
        }
    }
    found
}

pub fn restore(checkpoint: &Checkpoint, device: &Device) -> Result<SparseTransformer> {
    let config = &checkpoint.header.config;
    let record = ModuleRecord::from_bytes(Bytes::from_bytes_vec(checkpoint.model.clone()))
        .map_err(|error| anyhow!("{error}"))?;
    let model = new(&config.model, config.recipe.seed, device)?;
    let model = match config.chooses(checkpoint.header.step) {
        true => model,
        false => model.with_selections(&[], 0)?,
    };
    let model = indexers::staged(model, config, checkpoint.header.step)?;
    // Records store which blocks are kept, but not their number.
    let model = match (
        config.recipe.ff_prune,
        config.ff_density(checkpoint.header.step),
    ) {
        (Some(_), Some(density)) => prune(model, density)?.0,
        _ => model,
    };
    model
        .try_load_record(record)
        .context("the checkpoint's weights do not fit its configuration")
}

/// Removes selections, which caches do not support: layers attend by their patterns. Tells the user if there was one.
pub fn without_selections(model: SparseTransformer) -> Result<SparseTransformer> {
    let mut layers = model.blocks.iter().map(|block| &block.mha);
    let of_layer = layers.find_map(|mha| {
        let of_heads = || mha.head_selections().map(ToString::to_string);
        (mha.selection().map(ToString::to_string)).or_else(of_heads)
    });
    if let Some(selection) = of_layer {
        say(format!(
            "sampling attends to all keys of the pattern: {selection}, with which the model was trained, is not used"
        ));
    }
    Ok(model.with_selections(&[], 0)?)
}

/// Rejects a model whose heads choose by content in a way that pools of pages do not support, or in blocks that are not pages.
pub fn check_cached(config: &ModelConfig) -> Result<()> {
    match &config.content {
        Some(content) if !content.is_prefix_stable() => bail!(
            "the model was trained with --attention {content}: what its heads see of a byte depends on later ones, so it neither writes byte \
             by byte nor reads through a cache; enwik8 eval without a cache measures it"
        ),
        Some(ContentAttention::Nsa(nsa)) if nsa.pool_page_size().is_none() => bail!(
            "the model was trained with --attention nsa and SELECTED {}, STRIDE {}: pools need blocks that are whole pages of 16 keys or more, each of \
             whole strides, so it neither writes byte by byte nor reads through a cache; enwik8 eval without a cache measures it",
            nsa.selected_block,
            nsa.stride
        ),
        None | Some(_) => Ok(()),
    }
}

/// Returns the paper's optimizer: Adam with decoupled weight decay, and the gradient clipped by its norm over all parameters (§6). The default epsilon of
/// 1e-5 is not Adam's.
pub fn optimizer(recipe: &Recipe) -> FusedAdamW {
    FusedAdamWConfig::new()
        .with_beta_1(recipe.beta_1)
        .with_beta_2(recipe.beta_2)
        .with_epsilon(recipe.epsilon)
        .with_weight_decay(recipe.weight_decay)
        .with_max_grad_norm(Some(recipe.clip))
        .init()
}

/// Returns the attention patterns of all layers and heads.
pub fn factorization(config: &ModelConfig) -> Result<Factorization> {
    let patterns = config
        .patterns
        .iter()
        .map(|text| text.parse())
        .collect::<Result<Vec<Pattern>, _>>()?;
    Ok(match config.factorization {
        FactorizationKind::Merged => Factorization::Merged(patterns),
        FactorizationKind::Interleaved => Factorization::Interleaved(patterns),
        FactorizationKind::MultiHead => Factorization::MultiHead(patterns),
    })
}

/// Formats an entry of [`ways_of_heads`].
pub fn way_text(way: Option<&Selection>) -> String {
    way.map_or_else(|| "the pattern".to_owned(), ToString::to_string)
}

/// Describes the layers' attention in short.
pub fn attention_text(model: &ModelConfig) -> String {
    if let Some(content) = &model.content {
        if content.is_whole_layer() {
            return content.to_string();
        }
        return format!("{} and {content}", model.patterns.join(" / "));
    }
    let patterns = model.patterns.join(" / ");
    let choice = match (&model.selections[..], &model.head_selections[..]) {
        ([], []) => return patterns,
        (selections, []) => {
            let texts: Vec<String> = selections.iter().map(ToString::to_string).collect();
            texts.join(" / ")
        }
        _ => {
            let ways = ways_of_heads(model).into_iter();
            let texts: Vec<String> = ways
                .map(|(way, heads)| format!("{} in {heads}", way_text(way)))
                .collect();
            format!("heads by {}", texts.join(", "))
        }
    };
    match model.sees_everything() {
        true => choice,
        false => format!("{choice} within {patterns}"),
    }
}

/// Returns the operations of an optimizer step in 10¹²: a backward pass has twice those of a forward pass.
pub fn step_tflop(model: &SparseTransformer, config: &RunConfig) -> Result<f64> {
    let tokens = config.tokens_per_step() as u64;
    let attention = model.attention_flops(config.model.context)? * config.recipe.batch as u64;
    let forward = model.matmul_flops_per_token() * tokens + attention;
    Ok(3.0 * forward as f64 / 1e12)
}

pub fn bits(nats: f64) -> f64 {
    nats / LN_2
}

struct CountedIds(u64);

impl CountedIds {
    fn next(&mut self) -> ParamId {
        self.0 += 1;
        ParamId::from(self.0)
    }
}

impl ModuleMapper for CountedIds {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (_, tensor, mapper) = param.consume();
        Param::from_mapped_value(self.next(), tensor, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let (_, tensor, mapper) = param.consume();
        Param::from_mapped_value(self.next(), tensor, mapper)
    }
}
