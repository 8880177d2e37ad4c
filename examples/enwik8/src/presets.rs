//! Model and recipe of a run, and their presets.

pub mod list;

use std::fmt;
use std::str::FromStr;

use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::linear::WeightPattern;
use burn_sparse_transformer::{HeadSelections, Precision, Recompute, Selection, TransformerError};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::arguments::{CONTENT, LOG};
use crate::data::thousands;
use crate::images::format::Pictures;
use crate::prune::Pruning;
use crate::windows::Cut;
use crate::{arguments, notation};

/// A named starting point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// Minutes on a CPU
    Tiny,
    /// For one GPU: 8 layers, context 2048
    Small,
    /// The best found for 4 MB of text, in minutes on one GPU: 12 layers, context 4096, dropout 0.6
    #[value(name = "4mb", alias = "hour")]
    #[serde(rename = "4mb", alias = "hour")]
    FourMb,
    /// The paper's model with a recipe for a quarter of an hour on one GPU and 4 MB of text: context 12288
    Long,
    /// The enwik8 model and recipe of the Sparse Transformer paper: 95M parameters, context 12288
    Paper,
    /// Clusters of similar bytes, next to local heads (Roy et al., 2021): 6 layers, context 4096
    Routing,
    /// Bytes that hash alike, next to local heads (Kitaev et al., 2020): 6 layers, context 4096
    Reformer,
    /// Images, minutes on a CPU: 16 × 16 pixels, a synthetic set
    Shapes,
    /// The CIFAR-10 model and recipe of the Sparse Transformer paper: 59M parameters, context 3072
    Cifar,
}

/// Flags that all presets begin with.
pub const BASE: &str = "--context 256 --layers 2 --heads 4 --d-model 128 --pattern fixed:32,8 --block 16 --init-scale 0.125 \
     --batch 4 --steps 3000 --lr 1e-3 --warmup 150 --weight-decay 0.01 --beta1 0.9 --beta2 0.999 --epsilon 1e-8 --clip 1 --seed 1 \
     --eval-every 250 --eval-windows 32 --checkpoint-every 250 --log-every 50";

impl Preset {
    /// Returns the measured cost and result of its training, if any: docs/training.md and docs/sparse-or-dense.md.
    pub fn measured(self) -> Option<&'static str> {
        Some(match self {
            Preset::Tiny => "4 min 36 s, 64 MiB on two CPU cores; 2.640 bits per byte",
            Preset::Small => "14.4 ms a step, 2.8 GiB on an H200 in bf16",
            Preset::FourMb => {
                "5 min, 7.7 GiB on an H100 with --precision bf16 --graph; 1.766 bits per byte"
            }
            Preset::Long => {
                "18.5 min, 36.6 GiB on an H100 with --precision bf16 --graph; 1.824 bits per byte"
            }
            Preset::Shapes => {
                "4 min on two CPU cores for 1,200 of its 1,500 steps; 0.083 bits per dimension"
            }
            Preset::Routing | Preset::Reformer | Preset::Paper | Preset::Cifar => return None,
        })
    }

    /// Returns the flags in addition to [`BASE`].
    pub fn flags(self) -> &'static str {
        match self {
            // At this width the paper's scale slows learning at first: 2.8 bits per byte instead of 2.6 at the end. The second moment follows a short run
            // faster than the paper's long one.
            Preset::Tiny => "--init-scale 1 --beta2 0.99",
            // The paper's scale gives 3.3 bits per byte instead of 2.6 after 1,000 steps.
            Preset::Small => {
                "--context 2048 --layers 8 --heads 8 --d-model 384 --pattern fixed:128,32 --block 32 --dropout 0.1 --init-scale 1 \
                 --batch 16 --steps 20000 --lr 5e-4 --warmup 1000 --eval-every 500 --checkpoint-every 500"
            }
            // docs/sparse-or-dense.md lists the alternatives that were tried. More steps overfit 4 MB.
            Preset::FourMb => {
                "--context 4096 --layers 12 --heads 8 --d-model 384 --pattern fixed:128,32 --block 32 --dropout 0.6 --init-scale 1 \
                 --batch 8 --steps 11000 --lr 8e-4 --warmup 500 --weight-decay 0.1 --eval-every 500 --checkpoint-every 500"
            }
            // §7: 30 layers, 8 heads, d = 512, stride 128, c = 32, merged, dropout 0.40, context 12,288, 80 epochs. §6: Adam, 5,000
            // steps of warm-up, cosine decay, clip 1.0, weight decay 0.01. The paper gives neither the learning rate nor the batch
            // of its enwik8 model. The rate here is the one it gives for its CIFAR-10 model, and 8 windows (98,304 bytes) a step
            // make 80 epochs 73,242 steps.
            Preset::Paper => {
                "--context 12288 --layers 30 --heads 8 --d-model 512 --pattern fixed:128,32 --block 32 --dropout 0.4 \
                 --batch 8 --epochs 80 --lr 0.00035 --warmup 5000 --recompute segment:2 --eval-every 1000 --eval-windows 16 \
                 --checkpoint-every 500"
            }
            // docs/sparse-or-dense.md has the results.
            Preset::Long => {
                "--context 12288 --layers 30 --heads 8 --d-model 512 --pattern fixed:128,32 --block 32 --dropout 0.3 --init-scale 1 \
                 --steps 8400 --lr 7e-4 --warmup 200 --eval-windows 8 --checkpoint-every 500"
            }
            // Shapes, rates and batches of lucidrains' enwik8 scripts for both models, which state no length.
            Preset::Routing => {
                "--context 4096 --layers 6 --heads 8 --d-model 512 --block 32 --position-width 64 --init-scale 1 \
                 --attention routing:128 --local-heads 8,8,8,4,4,4 \
                 --steps 20000 --lr 1e-4 --warmup 1000 --eval-every 500 --checkpoint-every 500"
            }
            Preset::Reformer => {
                "--context 4096 --layers 6 --heads 8 --d-model 512 --block 32 --position-width 64 --init-scale 1 \
                 --attention lsh:64,4 --local-heads 4 \
                 --steps 20000 --lr 1e-4 --warmup 1000 --eval-every 500 --checkpoint-every 500"
            }
            Preset::Shapes => {
                "--init-scale 1 --picture-size 16 --classes 6 --steps 1500 --warmup 100 --beta2 0.99 --eval-windows 16"
            }
            // §7.1: 128 layers, 2 heads, d = 256, half-size feed-forward networks and query and key projections, strided attention, dropout 0.25, learning
            // rate 0.00035, 120 epochs of 48,000 images. The paper states neither the stride nor how the two parts are combined: here the stride is a row of
            // the image, and the parts are interleaved. The batch is ours.
            Preset::Cifar => {
                "--layers 128 --heads 2 --d-model 256 --d-key 128 --d-ff 512 --block 32 --factorization interleaved --dropout 0.25 \
                 --picture-size 32 --classes 10 --batch 16 --epochs 120 --lr 0.00035 --warmup 5000 --recompute segment:4 \
                 --eval-every 1000 --eval-windows 256 --checkpoint-every 500"
            }
        }
    }

    /// Returns the kind of its data.
    pub fn task(self) -> Task {
        match self {
            Preset::Shapes | Preset::Cifar => Task::Images,
            _ => Task::Text,
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// How patterns are spread over layers and heads (§5.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FactorizationKind {
    /// Each head attends to the union of all patterns
    #[default]
    Merged,
    /// Layer r uses pattern r mod p
    Interleaved,
    /// Head h uses pattern h mod p
    MultiHead,
}

/// `--attention`: the kind of attention.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionKind {
    /// The preset's pattern, or --pattern.
    Sparse,
    /// Every earlier position, through the same operation.
    Dense,
    /// Content-based, in the heads that are not local or in all of them.
    Content(ContentAttention),
}

impl FromStr for AttentionKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "sparse" => Ok(Self::Sparse),
            "dense" => Ok(Self::Dense),
            _ => match text.parse::<ContentAttention>() {
                Ok(content) => Ok(Self::Content(content)),
                // The flag already names the argument.
                Err(TransformerError::Argument {
                    argument: "content",
                    expected,
                    ..
                }) => {
                    let form = notation::form_of(text, ContentAttention::NOTATION);
                    Err(format!("must be {}", form.unwrap_or(&expected)))
                }
                Err(error) => Err(error.to_string()),
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    Steps(usize),
    /// Passes over the training split.
    Epochs(f64),
}

impl Default for Length {
    fn default() -> Self {
        Self::Steps(0)
    }
}

/// The model, whose fields are flags.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[command(next_help_heading = "Model (defaults from the preset: `enwik8 presets`)")]
pub struct ModelConfig {
    /// Bytes of context
    #[arg(long, value_parser = arguments::positive)]
    pub context: usize,
    /// Residual blocks
    #[arg(long, value_parser = arguments::positive)]
    pub layers: usize,
    /// Attention heads
    #[arg(long, value_parser = arguments::positive)]
    pub heads: usize,
    /// KV heads (GQA), a divisor of --heads [default: --heads]
    #[arg(long, value_parser = arguments::positive, value_name = "N")]
    #[serde(default)]
    pub kv_heads: Option<usize>,
    /// Hidden size
    #[arg(long, value_parser = arguments::positive)]
    pub d_model: usize,
    // In the notation of [`burn_blocksparse::Pattern::NOTATION`].
    #[arg(skip)]
    pub patterns: Vec<String>,
    /// Combination of several patterns
    #[arg(long, value_enum, help_heading = ATTENTION)]
    pub factorization: FactorizationKind,
    /// Block size of the attention layout: 8, 16, 32, 64 or 128
    #[arg(id = "block", long, value_name = "BLOCK", value_parser = arguments::positive, help_heading = ATTENTION)]
    pub block_size: usize,
    /// Skip tiles of queries and keys whose scores are all below the largest ones by more than T
    #[arg(long, value_parser = arguments::above_zero, value_name = "T", help_heading = ATTENTION)]
    #[serde(default)]
    pub softmax_threshold: Option<f64>,
    // Width of the matrix whose row and column embed a position (§5.3).
    /// Columns of the position matrix [default: the pattern's stride]
    #[arg(long, value_parser = arguments::positive, value_name = "N")]
    pub position_width: usize,
    /// Dropout at the end of each residual addition
    #[arg(long, value_parser = arguments::fraction)]
    pub dropout: f64,
    /// Initial weights have a standard deviation of SCALE / √(width of the input)
    #[arg(long, value_parser = arguments::above_zero, value_name = "SCALE")]
    #[serde(default = "paper_init_scale")]
    pub init_scale: f64,
    /// f32, or bf16 for mixed precision: activations, matmuls and attention in bf16, weights and
    /// optimizer in f32; or tf32: f32 with the attention's matmuls on tensor cores; or fp8: bf16,
    /// and FP8 in the attention's matmuls outside of training
    #[arg(long, value_parser = arguments::precision, value_name = "DTYPE")]
    #[serde(default)]
    pub precision: Precision,
    /// Inner size of the feed-forward networks [default: 4 · d-model]
    #[arg(long, value_parser = arguments::positive)]
    #[serde(default)]
    pub d_ff: Option<usize>,
    /// Size of the query and key projections, over all heads [default: d-model]
    #[arg(long, value_parser = arguments::positive)]
    #[serde(default)]
    pub d_key: Option<usize>,
    // None: dense weights, as in the paper.
    #[arg(skip)]
    #[serde(default)]
    pub ff_weights: Option<FeedForwardWeights>,
    // Selections of keys by content, which layers use in turn. Empty: layers use their patterns.
    #[arg(skip)]
    #[serde(default)]
    pub selections: Vec<Selection>,
    // Selections per head of each layer, instead of those. Empty: heads choose like their layers.
    #[arg(skip)]
    #[serde(default)]
    pub head_selections: Vec<HeadSelections>,
    /// Number of last layers without a selection
    #[arg(id = "selection_full_last", long = "selection-full-last", value_parser = arguments::whole, value_name = "N", requires = "selection", help_heading = CONTENT)]
    #[serde(default)]
    pub full_last_layers: usize,
    /// With --selection, or --attention dsa or msa: number of layers that share the choice of the first of them [default: 1]
    #[arg(long, value_parser = arguments::positive, value_name = "N", help_heading = CONTENT)]
    #[serde(default)]
    pub share_every: Option<usize>,
    // Content-based heads, which choose single keys or blocks. None: all heads use the patterns.
    #[arg(skip)]
    #[serde(default)]
    pub content: Option<ContentAttention>,
    // Number of each layer's heads that use the patterns, or one number for all layers. Empty: half of them.
    #[arg(skip)]
    #[serde(default)]
    pub local_heads: Vec<usize>,
    // Format of the images, if the bytes are images. None: the bytes are text.
    #[arg(skip)]
    #[serde(default)]
    pub pictures: Option<Pictures>,
}

/// Headings of flags.
pub const ATTENTION: &str = "Attention (defaults from the preset)";
pub const RECIPE: &str = "Recipe (defaults from the preset)";

/// What bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Task {
    /// Text, or any other bytes
    Text,
    /// Images, in CIFAR-10's binary format
    Images,
}

/// Pattern with which every byte sees all earlier ones.
pub const CAUSAL: &str = "causal";

impl ModelConfig {
    /// Returns the common configuration of text or of images, before the flags of [`BASE`] and of the preset, which states the size of images.
    pub fn base(task: Task) -> Self {
        let pictures = Pictures {
            side: 1,
            classes: 1,
            halved: false,
        };
        Self {
            pictures: (task == Task::Images).then_some(pictures),
            ..Self::default()
        }
    }

    /// Sets the format of images: a row is a row of the position matrix, and the stride of the pattern.
    pub fn with_pictures(mut self, pictures: Pictures) -> Self {
        let row = pictures.row();
        let parts = ["local", "strided"].map(|part| format!("{part}:{row}"));
        self.patterns = match self.factorization {
            FactorizationKind::Merged => vec![parts.join("+")],
            _ => parts.to_vec(),
        };
        self.context = pictures.bytes();
        self.position_width = row;
        self.pictures = Some(pictures);
        self
    }

    /// Returns whether layers choose keys by content, with one selection or with one per head.
    pub fn chooses(&self) -> bool {
        !self.selections.is_empty() || !self.head_selections.is_empty()
    }

    /// Returns whether the patterns let every byte see all earlier ones.
    pub fn sees_everything(&self) -> bool {
        self.patterns.iter().all(|text| text == CAUSAL)
    }

    /// Iterates over the selections of layers and heads.
    pub fn all_selections(&self) -> impl Iterator<Item = &Selection> {
        let heads = self.head_selections.iter();
        let of_heads = heads.flat_map(|of| (0..of.len()).filter_map(|head| of.of(head)));
        self.selections.iter().chain(of_heads)
    }

    /// Returns the kind of the bytes.
    pub fn task(&self) -> Task {
        match self.pictures {
            None => Task::Text,
            Some(_) => Task::Images,
        }
    }

    /// Returns how the bytes are cut into windows.
    pub fn cut(&self) -> Cut {
        match self.pictures {
            None => Cut::from(self.context),
            Some(pictures) => Cut::Pictures(pictures),
        }
    }

    /// Formats the model's size in a line.
    pub fn sizes(&self) -> String {
        format!(
            "{} layers, {} heads, d_model {}, context {}",
            self.layers,
            self.heads,
            self.d_model,
            thousands(self.context)
        )
    }

    /// Returns the unit of the loss: a byte of an image is one of its dimensions.
    pub fn unit(&self) -> &'static str {
        match self.task() {
            Task::Text => "bits per byte",
            Task::Images => "bits per dimension",
        }
    }

    /// Sets content-based heads, next to local heads that see about as many bytes, or in all heads with every earlier byte as a candidate.
    pub fn choose_by_content(&mut self, content: ContentAttention) {
        let pattern = match &content {
            content if content.is_whole_layer() => "causal".to_owned(),
            ContentAttention::Lsh(config) => format!("local:{}", 2 * config.bucket),
            other => format!("local:{}", other.window()),
        };
        self.patterns = vec![pattern];
        self.factorization = FactorizationKind::Merged;
        self.content = Some(content);
    }
}

/// Kept blocks of the feed-forward networks' weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FeedForwardWeights {
    pub density: f64,
    /// Side of a block.
    pub block: usize,
    /// Pattern of the kept blocks.
    pub layout: WeightPattern,
}

impl FeedForwardWeights {
    /// Returns a density with the defaults of the flags for block and layout.
    pub fn new(density: f64) -> Self {
        Self {
            density,
            block: 64,
            layout: WeightPattern::SmallWorld,
        }
    }
}

impl fmt::Display for FeedForwardWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layout, percent, block) = (self.layout, 100.0 * self.density, self.block);
        write!(f, "{layout}, {percent} % of the blocks of {block}")
    }
}

/// The paper's value (§6), which checkpoints without the field have too.
fn paper_init_scale() -> f64 {
    0.125
}

/// How the model is trained, of which fields are flags, too.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// Windows per step
    #[arg(long, value_parser = arguments::positive, help_heading = RECIPE, display_order = 0)]
    pub batch: usize,
    #[arg(skip)]
    pub length: Length,
    /// Highest learning rate
    #[arg(id = "lr", long, value_name = "LR", value_parser = arguments::above_zero, help_heading = RECIPE)]
    pub learning_rate: f64,
    /// Steps of linear warm-up
    #[arg(long, value_parser = arguments::whole, help_heading = RECIPE)]
    pub warmup: usize,
    /// Decoupled weight decay
    #[arg(long, value_parser = arguments::at_least_zero, help_heading = RECIPE)]
    pub weight_decay: f64,
    /// Adam's decay of the first moment
    #[arg(id = "beta1", long, value_name = "BETA1", value_parser = arguments::fraction, help_heading = RECIPE)]
    pub beta_1: f64,
    /// Adam's decay of the second moment
    #[arg(id = "beta2", long, value_name = "BETA2", value_parser = arguments::fraction, help_heading = RECIPE)]
    pub beta_2: f64,
    /// Adam's epsilon
    #[arg(long, value_parser = arguments::above_zero, help_heading = RECIPE)]
    pub epsilon: f64,
    /// Largest global norm of the gradient
    #[arg(long, value_parser = arguments::above_zero, help_heading = RECIPE)]
    pub clip: f64,
    /// Seed of weights, data order and dropout
    #[arg(long, value_parser = arguments::seed, help_heading = RECIPE)]
    pub seed: u64,
    /// Activation recomputation in the backward pass, to save memory: none, block (the default without a value), segment:N (segments of N blocks),
    /// block+attention or segment:N+attention (all but the attention), or mlp (the first matmul of the feed-forward networks)
    #[arg(long, num_args = 0..=1, default_missing_value = "block", value_name = "MODE", value_parser = arguments::recompute, help_heading = RECIPE)]
    pub recompute: Recompute,
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ff_prune: Option<Pruning>,
    /// Switch --selection off after this step
    #[arg(long, value_parser = arguments::positive, value_name = "STEP", help_heading = CONTENT)]
    #[serde(default)]
    pub selection_until: Option<usize>,
    /// With --attention dsa or msa: steps of dense attention, after --indexer-from, in which only the indexers learn [default: 0]
    #[arg(long, value_parser = arguments::whole, value_name = "STEPS", help_heading = CONTENT)]
    #[serde(default)]
    pub indexer_warmup: usize,
    /// With --attention dsa or msa: learning rate of the indexers in --indexer-warmup [default: --lr]
    #[arg(id = "indexer_lr", long = "indexer-lr", value_parser = arguments::above_zero, value_name = "RATE", help_heading = CONTENT)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub indexer_rate: Option<f64>,
    /// With --attention dsa or msa: steps of dense attention before that, in which only the model learns [default: 0]
    #[arg(long, value_parser = arguments::whole, value_name = "STEP", help_heading = CONTENT)]
    #[serde(default)]
    pub indexer_from: usize,
    /// Steps between measurements of the recall of --selection
    #[arg(long, value_parser = arguments::positive, value_name = "STEPS", help_heading = CONTENT)]
    #[serde(default)]
    pub recall_every: Option<usize>,
    /// Steps between validations
    #[arg(long, value_parser = arguments::positive, help_heading = LOG)]
    pub eval_every: usize,
    /// Windows per validation during training
    #[arg(long, value_parser = arguments::positive, help_heading = LOG)]
    pub eval_windows: usize,
    /// Steps between checkpoints
    #[arg(long, value_parser = arguments::positive, help_heading = LOG)]
    pub checkpoint_every: usize,
    /// Steps between printed lines
    #[arg(long, value_parser = arguments::positive, help_heading = LOG)]
    pub log_every: usize,
}
