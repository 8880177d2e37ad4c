//! A flag for every number of a preset.

use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::linear::WeightPattern;
use burn_sparse_transformer::{Precision, Recompute, Selection};
use clap::Args;

use crate::arguments::{CONTENT, IMAGES, LOG, SPARSE_MLP};
use crate::presets::{
    AttentionKind, CAUSAL, FactorizationKind, FeedForwardWeights, Length, ModelConfig, Recipe,
};
use crate::prune::Pruning;
use crate::search::{self, HeadChoices};
use crate::{arguments, notation, pattern};

/// One flag for each number of a preset.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Model (defaults from the preset: `enwik8 presets`)")]
pub struct Overrides {
    /// Bytes of context
    #[arg(long, value_parser = arguments::positive)]
    pub context: Option<usize>,
    /// Residual blocks
    #[arg(long, value_parser = arguments::positive)]
    pub layers: Option<usize>,
    /// Attention heads
    #[arg(long, value_parser = arguments::positive)]
    pub heads: Option<usize>,
    /// KV heads (GQA), a divisor of --heads [default: --heads]
    #[arg(long, value_parser = arguments::positive, value_name = "N")]
    pub kv_heads: Option<usize>,
    /// Hidden size
    #[arg(long, value_parser = arguments::positive)]
    pub d_model: Option<usize>,
    /// sparse, dense (causal, with the same parameters), or content-based heads: routing, lsh and dsa select single keys, nsa and msa blocks
    /// (`enwik8 patterns` lists the texts)
    #[arg(long, value_name = "TEXT", value_parser = notation::attention, help_heading = ATTENTION)]
    pub attention: Option<AttentionKind>,
    /// With --attention routing or lsh: heads of each layer that are local, or one number for all [default: half]
    #[arg(long, value_delimiter = ',', value_parser = arguments::positive, value_name = "N,N,..", help_heading = CONTENT)]
    pub local_heads: Vec<usize>,
    /// With --attention routing: factor of the commitment loss [default: 0.0001]
    #[arg(long, value_parser = arguments::at_least_zero, value_name = "FACTOR", help_heading = CONTENT)]
    pub commitment: Option<f64>,
    /// With --attention routing: decay of the cluster means per step [default: 0.999]
    #[arg(long, value_parser = arguments::ratio, value_name = "DECAY", help_heading = CONTENT)]
    pub means_decay: Option<f64>,
    /// Attention pattern, e.g. fixed:128,32 or local:64+strided:64 (`enwik8 patterns` lists all); repeat for --factorization
    #[arg(long, value_parser = notation::pattern_text, value_name = "PATTERN", help_heading = ATTENTION)]
    pub pattern: Vec<String>,
    /// Select blocks of keys by content, e.g. topk:32,8 (`enwik8 patterns` lists all), in all layers, or in turn if repeated. Candidates are every earlier
    /// byte, or those of --pattern, or with --attention sparse of the preset's; for moba and quest always every earlier byte
    #[arg(long, value_name = "TEXT", value_parser = notation::selection, help_heading = CONTENT)]
    pub selection: Vec<Selection>,
    /// A selection for each head of each layer, from search-selection
    #[arg(long, value_name = "FILE", value_parser = search::head_choices, conflicts_with = "selection", help_heading = CONTENT)]
    pub selection_file: Option<HeadChoices>,
    /// Number of last layers without a selection
    #[arg(long, value_parser = arguments::whole, value_name = "N", requires = "selection", help_heading = CONTENT)]
    pub selection_full_last: Option<usize>,
    /// With --selection, or --attention dsa or msa: number of layers that share the choice of the first of them [default: 1]
    #[arg(long, value_parser = arguments::positive, value_name = "N", help_heading = CONTENT)]
    pub share_every: Option<usize>,
    /// Combination of several patterns
    #[arg(long, value_enum, help_heading = ATTENTION)]
    pub factorization: Option<FactorizationKind>,
    /// Block size of the attention layout: 8, 16, 32, 64 or 128
    #[arg(long, value_parser = arguments::positive, help_heading = ATTENTION)]
    pub block: Option<usize>,
    /// Skip tiles of queries and keys whose scores are all below the largest ones by more than T
    #[arg(long, value_parser = arguments::above_zero, value_name = "T", help_heading = ATTENTION)]
    pub softmax_threshold: Option<f64>,
    /// Columns of the position matrix [default: the pattern's stride]
    #[arg(long, value_parser = arguments::positive, value_name = "N")]
    pub position_width: Option<usize>,
    /// Dropout at the end of each residual addition
    #[arg(long, value_parser = arguments::fraction)]
    pub dropout: Option<f64>,
    /// Initial weights have a standard deviation of SCALE / √(width of the input)
    #[arg(long, value_parser = arguments::above_zero, value_name = "SCALE")]
    pub init_scale: Option<f64>,
    /// f32, or bf16 for mixed precision: activations, matmuls and attention in bf16, weights and
    /// optimizer in f32; or tf32: f32 with the attention's matmuls on tensor cores
    #[arg(long, value_parser = arguments::precision, value_name = "DTYPE")]
    pub precision: Option<Precision>,
    /// Inner size of the feed-forward networks [default: 4 · d-model]
    #[arg(long, value_parser = arguments::positive)]
    pub d_ff: Option<usize>,
    /// Size of the query and key projections, over all heads [default: d-model]
    #[arg(long, value_parser = arguments::positive)]
    pub d_key: Option<usize>,
    /// Width and height of the images, in pixels
    #[arg(long, value_parser = arguments::positive, value_name = "N", help_heading = IMAGES)]
    pub picture_size: Option<usize>,
    /// Number of classes, counted from 0
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256), help_heading = IMAGES)]
    pub classes: Option<u16>,
    /// Halve the width and height of the data's images: means of four pixels
    #[arg(long, help_heading = IMAGES)]
    pub halve: bool,
    /// Share of blocks that the feed-forward networks' weights have [default: dense weights]
    #[arg(long, value_parser = arguments::share, value_name = "SHARE", help_heading = SPARSE_MLP)]
    pub ff_density: Option<f64>,
    /// Side of those blocks: 16, 32, 64 or 128 [default: 64]
    #[arg(long, value_parser = arguments::positive, requires = "ff_density", help_heading = SPARSE_MLP)]
    pub ff_block: Option<usize>,
    /// Layout of those blocks [default: small-world]
    #[arg(long, value_parser = arguments::weight_pattern(), requires = "ff_density", value_name = "LAYOUT", help_heading = SPARSE_MLP)]
    pub ff_layout: Option<WeightPattern>,
    /// Prune those blocks by magnitude, down to this share of all blocks
    #[arg(long, value_parser = arguments::share, requires_all = ["ff_density", "ff_prune_until"], value_name = "SHARE", help_heading = SPARSE_MLP)]
    pub ff_prune: Option<f64>,
    /// Steps before the first blocks are pruned [default: --warmup]
    #[arg(long, value_parser = arguments::whole, requires = "ff_prune", value_name = "STEP", help_heading = SPARSE_MLP)]
    pub ff_prune_from: Option<usize>,
    /// Steps after which the last blocks are pruned
    #[arg(long, value_parser = arguments::positive, requires = "ff_prune", value_name = "STEP", help_heading = SPARSE_MLP)]
    pub ff_prune_until: Option<usize>,
    /// Steps between two prunings [default: 100]
    #[arg(long, value_parser = arguments::positive, requires = "ff_prune", value_name = "STEPS", help_heading = SPARSE_MLP)]
    pub ff_prune_every: Option<usize>,

    /// Windows per step
    #[arg(long, value_parser = arguments::positive, help_heading = RECIPE)]
    pub batch: Option<usize>,
    /// Optimizer steps
    #[arg(long, value_parser = arguments::positive, help_heading = RECIPE)]
    pub steps: Option<usize>,
    /// Passes over the training data, instead of --steps
    #[arg(long, value_parser = arguments::above_zero, conflicts_with = "steps", help_heading = RECIPE)]
    pub epochs: Option<f64>,
    /// Highest learning rate
    #[arg(long, value_parser = arguments::above_zero, help_heading = RECIPE)]
    pub lr: Option<f64>,
    /// Steps of linear warm-up
    #[arg(long, value_parser = arguments::whole, help_heading = RECIPE)]
    pub warmup: Option<usize>,
    /// Decoupled weight decay
    #[arg(long, value_parser = arguments::at_least_zero, help_heading = RECIPE)]
    pub weight_decay: Option<f64>,
    /// Adam's decay of the first moment
    #[arg(long, value_parser = arguments::fraction, help_heading = RECIPE)]
    pub beta1: Option<f64>,
    /// Adam's decay of the second moment
    #[arg(long, value_parser = arguments::fraction, help_heading = RECIPE)]
    pub beta2: Option<f64>,
    /// Adam's epsilon
    #[arg(long, value_parser = arguments::above_zero, help_heading = RECIPE)]
    pub epsilon: Option<f64>,
    /// Largest global norm of the gradient
    #[arg(long, value_parser = arguments::above_zero, help_heading = RECIPE)]
    pub clip: Option<f64>,
    /// Seed of weights, data order and dropout
    #[arg(long, value_parser = arguments::seed, help_heading = RECIPE)]
    pub seed: Option<u64>,
    /// Activation recomputation in the backward pass, to save memory: none, block (the default without a value), segment:N (segments of N blocks),
    /// block+attention or segment:N+attention (all but the attention), or mlp (the first matmul of the feed-forward networks)
    #[arg(long, num_args = 0..=1, default_missing_value = "block", value_name = "MODE", value_parser = arguments::recompute, help_heading = RECIPE)]
    pub recompute: Option<Recompute>,
    /// Switch --selection off after this step
    #[arg(long, value_parser = arguments::positive, value_name = "STEP", help_heading = CONTENT)]
    pub selection_until: Option<usize>,
    /// With --attention dsa or msa: steps of dense attention, after --indexer-from, in which only the indexers learn [default: 0]
    #[arg(long, value_parser = arguments::whole, value_name = "STEPS", help_heading = CONTENT)]
    pub indexer_warmup: Option<usize>,
    /// With --attention dsa or msa: learning rate of the indexers in --indexer-warmup [default: --lr]
    #[arg(long, value_parser = arguments::above_zero, value_name = "RATE", help_heading = CONTENT)]
    pub indexer_lr: Option<f64>,
    /// With --attention dsa or msa: steps of dense attention before that, in which only the model learns [default: 0]
    #[arg(long, value_parser = arguments::whole, value_name = "STEP", help_heading = CONTENT)]
    pub indexer_from: Option<usize>,
    /// Steps between measurements of the recall of --selection
    #[arg(long, value_parser = arguments::positive, value_name = "STEPS", help_heading = CONTENT)]
    pub recall_every: Option<usize>,
    /// Steps between validations
    #[arg(long, value_parser = arguments::positive, help_heading = LOG)]
    pub eval_every: Option<usize>,
    /// Windows per validation during training
    #[arg(long, value_parser = arguments::positive, help_heading = LOG)]
    pub eval_windows: Option<usize>,
    /// Steps between checkpoints
    #[arg(long, value_parser = arguments::positive, help_heading = LOG)]
    pub checkpoint_every: Option<usize>,
    /// Steps between printed lines
    #[arg(long, value_parser = arguments::positive, help_heading = LOG)]
    pub log_every: Option<usize>,
}

const ATTENTION: &str = "Attention (defaults from the preset)";
const RECIPE: &str = "Recipe (defaults from the preset)";

impl Overrides {
    /// Makes the user's changes; nothing is checked.
    pub fn apply(&self, model: &mut ModelConfig, recipe: &mut Recipe) {
        set(&mut model.context, self.context);
        set(&mut model.layers, self.layers);
        set(&mut model.heads, self.heads);
        set(&mut model.d_model, self.d_model);
        set(&mut model.factorization, self.factorization);
        set(&mut model.block_size, self.block);
        set(&mut model.dropout, self.dropout);
        set(&mut model.init_scale, self.init_scale);
        set(&mut model.precision, self.precision);
        model.d_ff = self.d_ff.or(model.d_ff);
        model.kv_heads = self.kv_heads.or(model.kv_heads);
        model.d_key = self.d_key.or(model.d_key);
        model.softmax_threshold = self.softmax_threshold.or(model.softmax_threshold);
        let changed = self.picture_size.is_some() || self.classes.is_some() || self.halve;
        if let Some(mut pictures) = model.pictures.filter(|_| changed) {
            set(&mut pictures.side, self.picture_size);
            set(&mut pictures.classes, self.classes.map(usize::from));
            pictures.halved |= self.halve;
            let patterns = std::mem::take(&mut model.patterns);
            *model = model.clone().with_pictures(pictures);
            if self.picture_size.is_none() {
                model.patterns = patterns;
            }
        }
        if let Some(density) = self.ff_density {
            let mut weights = FeedForwardWeights::new(density);
            set(&mut weights.block, self.ff_block);
            set(&mut weights.layout, self.ff_layout);
            model.ff_weights = Some(weights);
        }
        if let Some(AttentionKind::Content(content)) = &self.attention {
            model.choose_by_content(content.clone());
            model.local_heads = Vec::new();
        }
        if matches!(
            self.attention,
            Some(AttentionKind::Sparse | AttentionKind::Dense)
        ) {
            model.content = None;
            model.local_heads = Vec::new();
        }
        if !self.local_heads.is_empty() {
            model.local_heads = self.local_heads.clone();
        }
        if let Some(ContentAttention::Routing(routing)) = &mut model.content {
            set(&mut routing.commitment, self.commitment);
            set(&mut routing.means_decay, self.means_decay);
        }
        if !self.pattern.is_empty() {
            // A picture's row stays one.
            if model.pictures.is_none() {
                model.position_width = position_width_for(&self.pattern, model.context);
            }
            model.patterns = self.pattern.clone();
        }
        let chooses = !self.selection.is_empty() || self.selection_file.is_some();
        // With either flag the choice is made within the pattern, that of the preset or the one given.
        let keeps_pattern =
            !self.pattern.is_empty() || self.attention == Some(AttentionKind::Sparse);
        if chooses {
            model.selections = self.selection.clone();
            let file = self.selection_file.clone();
            model.head_selections = file.map_or(Vec::new(), |file| file.layers);
        }
        set(&mut model.full_last_layers, self.selection_full_last);
        model.share_every = self.share_every.or(model.share_every);
        // The position embedding stays that of the sparse model, so that the two have the same parameters.
        if self.attention == Some(AttentionKind::Dense) || chooses && !keeps_pattern {
            model.patterns = vec![CAUSAL.to_owned()];
            model.factorization = FactorizationKind::Merged;
        }
        set(&mut model.position_width, self.position_width);

        set(&mut recipe.batch, self.batch);
        set(&mut recipe.length, self.steps.map(Length::Steps));
        set(&mut recipe.length, self.epochs.map(Length::Epochs));
        set(&mut recipe.learning_rate, self.lr);
        set(&mut recipe.warmup, self.warmup);
        set(&mut recipe.weight_decay, self.weight_decay);
        set(&mut recipe.beta_1, self.beta1);
        set(&mut recipe.beta_2, self.beta2);
        set(&mut recipe.epsilon, self.epsilon);
        set(&mut recipe.clip, self.clip);
        set(&mut recipe.seed, self.seed);
        set(&mut recipe.recompute, self.recompute);
        if let Some((density, until)) = self.ff_prune.zip(self.ff_prune_until) {
            recipe.ff_prune = Some(Pruning {
                density,
                from: self.ff_prune_from.unwrap_or(recipe.warmup),
                until,
                every: self.ff_prune_every.unwrap_or(100),
            });
        }
        recipe.selection_until = self.selection_until.or(recipe.selection_until);
        set(&mut recipe.indexer_warmup, self.indexer_warmup);
        set(&mut recipe.indexer_from, self.indexer_from);
        recipe.indexer_rate = self.indexer_lr.or(recipe.indexer_rate);
        recipe.recall_every = self.recall_every.or(recipe.recall_every);
        set(&mut recipe.eval_every, self.eval_every);
        set(&mut recipe.eval_windows, self.eval_windows);
        set(&mut recipe.checkpoint_every, self.checkpoint_every);
        set(&mut recipe.log_every, self.log_every);
    }
}

#[cfg(test)]
impl Overrides {
    /// Those of a command line.
    pub fn read(line: &str) -> Self {
        let command = clap::Command::new("flags").no_binary_name(true);
        let matches = Self::augment_args(command).try_get_matches_from(line.split_whitespace());
        clap::FromArgMatches::from_arg_matches(&matches.unwrap()).unwrap()
    }
}

fn set<T>(value: &mut T, new: Option<T>) {
    if let Some(new) = new {
        *value = new;
    }
}

/// The first pattern's stride, or a power of two near the square root of the context.
fn position_width_for(patterns: &[String], context: usize) -> usize {
    patterns
        .iter()
        .find_map(|text| pattern::stride(&text.parse().ok()?))
        .filter(|&stride| stride > 0)
        .unwrap_or_else(|| (context.isqrt()).next_power_of_two())
}
