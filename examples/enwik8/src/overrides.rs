//! Flags that change a preset.

use anyhow::Result;
use burn_sparse_transformer::Selection;
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::linear::WeightPattern;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches};

use crate::arguments::{CONTENT, IMAGES, SPARSE_MLP};
use crate::presets::{
    ATTENTION, AttentionKind, CAUSAL, FactorizationKind, FeedForwardWeights, Length, ModelConfig,
    RECIPE, Recipe,
};
use crate::prune::Pruning;
use crate::search::{self, HeadChoices};
use crate::{arguments, notation, pattern};

/// Flags of which one changes several fields of a preset, or several change one.
#[derive(Args, Clone, Debug)]
#[command(next_display_order = 1)]
pub struct Changes {
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
    /// Optimizer steps
    #[arg(long, value_parser = arguments::positive, help_heading = RECIPE)]
    pub steps: Option<usize>,
    /// Passes over the training data, instead of --steps
    #[arg(long, value_parser = arguments::above_zero, conflicts_with = "steps", help_heading = RECIPE)]
    pub epochs: Option<f64>,
}

/// All flags that change a preset: those of its fields, and [`Changes`].
#[derive(Clone, Debug)]
pub struct Overrides {
    pub changes: Changes,
    given: ArgMatches,
}

impl Args for Overrides {
    fn augment_args(command: Command) -> Command {
        // After those of `Changes` in their headings.
        let command = ModelConfig::augment_args_for_update(command.next_display_order(100));
        let command = Changes::augment_args(command).next_display_order(200);
        Recipe::augment_args_for_update(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Overrides {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        Ok(Self {
            changes: Changes::from_arg_matches(matches)?,
            given: matches.clone(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Overrides {
    /// Returns whether a flag was given, by its long name.
    pub fn gives(&self, flag: &str) -> bool {
        let source = self.given.value_source(&flag.replace('-', "_"));
        source == Some(ValueSource::CommandLine)
    }

    /// Returns the same overrides with dense attention, without a pattern and flags of content-based attention.
    pub fn dense(&self) -> Result<Self> {
        let mut given = self.given.clone();
        let flags = Self::augment_args(Command::new("flags"));
        let is_content = |flag: &&Arg| flag.get_help_heading() == Some(CONTENT);
        let content = flags.get_arguments().filter(is_content);
        for flag in content
            .map(|flag| flag.get_id().as_str())
            .chain(["pattern"])
        {
            given.try_clear_id(flag)?;
        }
        let mut dense = Self::from_arg_matches(&given)?;
        dense.changes.attention = Some(AttentionKind::Dense);
        Ok(dense)
    }

    /// Applies the user's changes without checking them.
    pub fn apply(&self, model: &mut ModelConfig, recipe: &mut Recipe) -> Result<()> {
        model.update_from_arg_matches(&self.given)?;
        recipe.update_from_arg_matches(&self.given)?;
        let of = &self.changes;
        if let Some(mut pictures) = model.pictures.filter(|_| of.changes_pictures()) {
            set(&mut pictures.side, of.picture_size);
            set(&mut pictures.classes, of.classes.map(usize::from));
            pictures.halved |= of.halve;
            let patterns = std::mem::take(&mut model.patterns);
            *model = model.clone().with_pictures(pictures);
            if of.picture_size.is_none() {
                model.patterns = patterns;
            }
        }
        if let Some(density) = of.ff_density {
            let mut weights = FeedForwardWeights::new(density);
            set(&mut weights.block, of.ff_block);
            set(&mut weights.layout, of.ff_layout);
            model.ff_weights = Some(weights);
        }
        if let Some(attention) = &of.attention {
            model.content = None;
            model.local_heads = Vec::new();
            if let AttentionKind::Content(content) = attention {
                model.choose_by_content(content.clone());
            }
        }
        if !of.local_heads.is_empty() {
            model.local_heads = of.local_heads.clone();
        }
        if let Some(ContentAttention::Routing(routing)) = &mut model.content {
            set(&mut routing.commitment, of.commitment);
            set(&mut routing.means_decay, of.means_decay);
        }
        if !of.pattern.is_empty() {
            // For images, the width stays that of a row.
            if model.pictures.is_none() && !self.gives("position-width") {
                model.position_width = position_width_for(&of.pattern, model.context);
            }
            model.patterns = of.pattern.clone();
        }
        let chooses = !of.selection.is_empty() || of.selection_file.is_some();
        // With either flag the selection chooses within the pattern, the preset's or the given one.
        let keeps_pattern = !of.pattern.is_empty() || of.attention == Some(AttentionKind::Sparse);
        if chooses {
            model.selections = of.selection.clone();
            let file = of.selection_file.clone();
            model.head_selections = file.map_or(Vec::new(), |file| file.layers);
        }
        // The position embedding stays that of the sparse model, so that both have the same parameters.
        if of.attention == Some(AttentionKind::Dense) || chooses && !keeps_pattern {
            model.patterns = vec![CAUSAL.to_owned()];
            model.factorization = FactorizationKind::Merged;
        }
        set(&mut recipe.length, of.steps.map(Length::Steps));
        set(&mut recipe.length, of.epochs.map(Length::Epochs));
        if let Some((density, until)) = of.ff_prune.zip(of.ff_prune_until) {
            recipe.ff_prune = Some(Pruning {
                density,
                from: of.ff_prune_from.unwrap_or(recipe.warmup),
                until,
                every: of.ff_prune_every.unwrap_or(100),
            });
        }
        Ok(())
    }
}

impl Changes {
    pub fn changes_pictures(&self) -> bool {
        self.picture_size.is_some() || self.classes.is_some() || self.halve
    }
}

impl Overrides {
    /// Returns the overrides of a line that this program wrote.
    pub fn read(line: &str) -> Self {
        let command = Self::augment_args(Command::new("flags").no_binary_name(true));
        let matches = command.try_get_matches_from(line.split_whitespace());
        let read = matches.and_then(|matches| Self::from_arg_matches(&matches));
        read.expect("flags of ours")
    }
}

fn set<T>(value: &mut T, new: Option<T>) {
    if let Some(new) = new {
        *value = new;
    }
}

/// Returns the first pattern's stride, or a power of two near the square root of the context.
fn position_width_for(patterns: &[String], context: usize) -> usize {
    patterns
        .iter()
        .find_map(|text| pattern::stride(&text.parse().ok()?))
        .filter(|&stride| stride > 0)
        .unwrap_or_else(|| (context.isqrt()).next_power_of_two())
}
