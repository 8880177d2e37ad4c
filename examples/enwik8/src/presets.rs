//! Model and recipe of a run: three presets, and a flag for every number in them.

use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use burn_blocksparse::{BLOCK_SIZES, Pattern};
use burn_sparse_transformer::Precision;
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::pattern;

/// A named starting point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// Minutes on a CPU
    Tiny,
    /// For one GPU: 8 layers, context 2048
    Small,
    /// The enwik8 model and recipe of the Sparse Transformer paper: 95M parameters, context 12288
    Paper,
}

impl Preset {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Preset::Tiny => "tiny",
            Preset::Small => "small",
            Preset::Paper => "paper",
        }
    }

    fn model(self) -> ModelConfig {
        let fixed = |stride, columns| vec![format!("fixed:{stride},{columns}")];
        let base = ModelConfig {
            context: 256,
            layers: 2,
            heads: 4,
            d_model: 128,
            patterns: fixed(32, 8),
            factorization: FactorizationKind::Merged,
            block_size: 16,
            position_width: 32,
            dropout: 0.0,
            init_scale: paper_init_scale(),
            precision: Precision::F32,
        };
        match self {
            // At these widths the paper's scale makes learning slow at first: 2.8 bits per byte instead of 2.6 at the end of `tiny`, 3.3
            // instead of 2.6 after 1,000 steps of `small`.
            Preset::Tiny => ModelConfig {
                init_scale: 1.0,
                ..base
            },
            Preset::Small => ModelConfig {
                context: 2048,
                layers: 8,
                heads: 8,
                d_model: 384,
                patterns: fixed(128, 32),
                block_size: 32,
                position_width: 128,
                dropout: 0.1,
                init_scale: 1.0,
                ..base
            },
            // §7: 30 layers, 8 heads, d = 512, stride 128, c = 32, merged, dropout 0.40, context 12,288.
            Preset::Paper => ModelConfig {
                context: 12_288,
                layers: 30,
                heads: 8,
                d_model: 512,
                patterns: fixed(128, 32),
                block_size: 32,
                position_width: 128,
                dropout: 0.40,
                ..base
            },
        }
    }

    fn recipe(self) -> Recipe {
        let base = Recipe {
            batch: 4,
            length: Length::Steps(3_000),
            learning_rate: 1e-3,
            warmup: 150,
            weight_decay: 0.01,
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            clip: 1.0,
            seed: 1,
            recompute: false,
            eval_every: 250,
            eval_windows: 32,
            checkpoint_every: 250,
            log_every: 50,
        };
        match self {
            // The second moment follows a short run faster than the paper's long one.
            Preset::Tiny => Recipe {
                beta_2: 0.99,
                ..base
            },
            Preset::Small => Recipe {
                batch: 16,
                length: Length::Steps(20_000),
                learning_rate: 5e-4,
                warmup: 1_000,
                eval_every: 500,
                checkpoint_every: 500,
                ..base
            },
            // §6: Adam, 5,000 steps of warm-up, cosine decay, clip 1.0, weight decay 0.01; §7: 80 epochs.
            // The paper gives neither the learning rate nor the batch of its enwik8 model. The rate here is the one it
            // gives for its CIFAR-10 model, and 8 windows (98,304 bytes) a step make 80 epochs 73,242 steps.
            Preset::Paper => Recipe {
                batch: 8,
                length: Length::Epochs(80.0),
                // Not of this experiment: see above.
                learning_rate: 0.00035,
                warmup: 5_000,
                recompute: true,
                eval_every: 1_000,
                eval_windows: 16,
                checkpoint_every: 500,
                ..base
            },
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How patterns are spread over layers and heads (§5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FactorizationKind {
    /// Each head attends to the union of all patterns
    Merged,
    /// Layer r uses pattern r mod p
    Interleaved,
    /// Head h uses pattern h mod p
    MultiHead,
}

/// Sparse or dense attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// The preset's pattern, or --pattern
    Sparse,
    /// Every earlier position, through the same operation
    Dense,
}

/// How long to train.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    /// Optimizer steps.
    Steps(usize),
    /// Passes over the training split.
    Epochs(f64),
}

/// Shape of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Longest window, in bytes.
    pub context: usize,
    /// Residual blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Attention patterns in the notation of [`Pattern::NOTATION`].
    pub patterns: Vec<String>,
    /// How the patterns are combined.
    pub factorization: FactorizationKind,
    /// Block size of the attention layout.
    pub block_size: usize,
    /// Width of the matrix whose row and column embed a position (§5.3).
    pub position_width: usize,
    /// Dropout at the end of each residual addition.
    pub dropout: f64,
    /// Initial weights have a standard deviation of this over the root of their input's width (§6: 0.125).
    #[serde(default = "paper_init_scale")]
    pub init_scale: f64,
    /// Dtype of activations, matrix products and attention. Weights and Adam's moments are f32 in any case.
    #[serde(default)]
    pub precision: Precision,
}

/// §6. Also that of checkpoints from before it could be chosen.
fn paper_init_scale() -> f64 {
    0.125
}

/// How the model is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// Windows per step.
    pub batch: usize,
    /// Steps or epochs.
    pub length: Length,
    /// Highest learning rate.
    pub learning_rate: f64,
    /// Steps of linear warm-up.
    pub warmup: usize,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Adam's decay of the first moment.
    pub beta_1: f64,
    /// Adam's decay of the second moment.
    pub beta_2: f64,
    /// Adam's epsilon.
    pub epsilon: f64,
    /// Largest global gradient norm.
    pub clip: f64,
    /// Seed of weights, data order and dropout.
    pub seed: u64,
    /// Recompute each block in the backward pass instead of storing its activations (§5.4).
    pub recompute: bool,
    /// Steps between validations.
    pub eval_every: usize,
    /// Windows per validation during training.
    pub eval_windows: usize,
    /// Steps between checkpoints.
    pub checkpoint_every: usize,
    /// Steps between printed lines.
    pub log_every: usize,
}

/// All that defines a run besides its data. Stored in the run folder and in every checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunConfig {
    /// Where the numbers come from.
    pub preset: Preset,
    /// Shape of the model.
    pub model: ModelConfig,
    /// How it is trained.
    pub recipe: Recipe,
}

/// One flag for each number of a preset.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Model (defaults from the preset)")]
pub struct Overrides {
    /// Bytes of context
    #[arg(long, value_parser = positive)]
    pub context: Option<usize>,
    /// Residual blocks
    #[arg(long, value_parser = positive)]
    pub layers: Option<usize>,
    /// Attention heads
    #[arg(long, value_parser = positive)]
    pub heads: Option<usize>,
    /// Width of the model
    #[arg(long, value_parser = positive)]
    pub d_model: Option<usize>,
    /// Sparse attention, or dense causal attention with the same parameters
    #[arg(long, value_enum)]
    pub attention: Option<Attention>,
    /// Attention pattern, e.g. fixed:128,32 or local:64+strided:64; repeat for --factorization
    #[arg(long, value_parser = pattern::checked, value_name = "PATTERN", long_help = pattern::help(
        "Attention pattern, e.g. fixed:128,32 or local:64+strided:64; repeat for --factorization",
    ))]
    pub pattern: Vec<String>,
    /// How several patterns are combined
    #[arg(long, value_enum)]
    pub factorization: Option<FactorizationKind>,
    /// Block size of the attention layout: 8, 16, 32, 64 or 128
    #[arg(long, value_parser = positive)]
    pub block: Option<usize>,
    /// Width of the position matrix [default: the pattern's stride]
    #[arg(long, value_parser = positive)]
    pub position_width: Option<usize>,
    /// Dropout at the end of each residual addition
    #[arg(long, value_parser = fraction)]
    pub dropout: Option<f64>,
    /// Initial weights have a standard deviation of SCALE / √(width of the input)
    #[arg(long, value_parser = rate, value_name = "SCALE")]
    pub init_scale: Option<f64>,
    /// f32, or bf16 for mixed precision: activations, matrix products and attention in bf16, weights and
    /// optimizer in f32; or tf32: f32 with the attention's products on tensor cores
    #[arg(long, value_parser = precision, value_name = "f32|tf32|bf16")]
    pub precision: Option<Precision>,

    /// Windows per step
    #[arg(long, value_parser = positive, help_heading = RECIPE)]
    pub batch: Option<usize>,
    /// Optimizer steps
    #[arg(long, value_parser = positive, help_heading = RECIPE)]
    pub steps: Option<usize>,
    /// Passes over the training data, instead of --steps
    #[arg(long, value_parser = rate, conflicts_with = "steps", help_heading = RECIPE)]
    pub epochs: Option<f64>,
    /// Highest learning rate
    #[arg(long, value_parser = rate, help_heading = RECIPE)]
    pub lr: Option<f64>,
    /// Steps of linear warm-up
    #[arg(long, help_heading = RECIPE)]
    pub warmup: Option<usize>,
    /// Decoupled weight decay
    #[arg(long, value_parser = non_negative, help_heading = RECIPE)]
    pub weight_decay: Option<f64>,
    /// Adam's decay of the first moment
    #[arg(long, value_parser = fraction, help_heading = RECIPE)]
    pub beta1: Option<f64>,
    /// Adam's decay of the second moment
    #[arg(long, value_parser = fraction, help_heading = RECIPE)]
    pub beta2: Option<f64>,
    /// Adam's epsilon
    #[arg(long, value_parser = rate, help_heading = RECIPE)]
    pub epsilon: Option<f64>,
    /// Largest global norm of the gradient
    #[arg(long, value_parser = rate, help_heading = RECIPE)]
    pub clip: Option<f64>,
    /// Seed of weights, data order and dropout
    #[arg(long, help_heading = RECIPE)]
    pub seed: Option<u64>,
    /// Recompute blocks in the backward pass to save memory
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "true|false", help_heading = RECIPE)]
    pub recompute: Option<bool>,
    /// Steps between validations
    #[arg(long, value_parser = positive, help_heading = RECIPE)]
    pub eval_every: Option<usize>,
    /// Windows per validation during training
    #[arg(long, value_parser = positive, help_heading = RECIPE)]
    pub eval_windows: Option<usize>,
    /// Steps between checkpoints
    #[arg(long, value_parser = positive, help_heading = RECIPE)]
    pub checkpoint_every: Option<usize>,
    /// Steps between printed lines
    #[arg(long, value_parser = positive, help_heading = RECIPE)]
    pub log_every: Option<usize>,
}

const RECIPE: &str = "Recipe (defaults from the preset)";

impl RunConfig {
    /// A preset with the user's changes.
    ///
    /// # Errors
    /// If the result is no causal language model, or its numbers do not go together.
    pub fn new(preset: Preset, overrides: &Overrides) -> Result<Self> {
        let mut config = RunConfig {
            preset,
            model: preset.model(),
            recipe: preset.recipe(),
        };
        ensure!(
            overrides.attention != Some(Attention::Dense) || overrides.pattern.is_empty(),
            "--attention dense is a pattern by itself; leave out --pattern"
        );
        config.apply(overrides);
        config.check()?;
        Ok(config)
    }

    /// A stored configuration on resume: only what leaves the past of the run true may change.
    ///
    /// # Errors
    /// Names the first flag that contradicts the run.
    pub fn resumed(&self, preset: Option<Preset>, overrides: &Overrides) -> Result<Self> {
        let mut wanted = self.clone();
        wanted.preset = preset.unwrap_or(self.preset);
        wanted.apply(overrides);
        let allowed = RunConfig {
            recipe: Recipe {
                length: wanted.recipe.length,
                recompute: wanted.recipe.recompute,
                eval_every: wanted.recipe.eval_every,
                eval_windows: wanted.recipe.eval_windows,
                checkpoint_every: wanted.recipe.checkpoint_every,
                log_every: wanted.recipe.log_every,
                ..self.recipe.clone()
            },
            ..self.clone()
        };
        if allowed != wanted {
            let (stored, asked) = first_difference(&allowed, &wanted);
            bail!(
                "--resume continues the run as it was begun, with {stored}, but {asked} was asked for; \
                 leave that flag out, or begin another run with --run DIR"
            );
        }
        wanted.check()?;
        Ok(wanted)
    }

    /// Optimizer steps of the run on a training split of `train_bytes`.
    pub fn steps(&self, train_bytes: usize) -> usize {
        match self.recipe.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => {
                let step = (self.recipe.batch * self.model.context) as f64;
                ((epochs * train_bytes as f64 / step) as usize).max(1)
            }
        }
    }

    /// Bytes predicted in one step.
    pub fn tokens_per_step(&self) -> usize {
        self.recipe.batch * self.model.context
    }

    fn apply(&mut self, overrides: &Overrides) {
        let Overrides {
            context,
            layers,
            heads,
            d_model,
            attention,
            pattern,
            factorization,
            block,
            position_width,
            dropout,
            init_scale,
            precision,
            batch,
            steps,
            epochs,
            lr,
            warmup,
            weight_decay,
            beta1,
            beta2,
            epsilon,
            clip,
            seed,
            recompute,
            eval_every,
            eval_windows,
            checkpoint_every,
            log_every,
        } = overrides.clone();

        let model = &mut self.model;
        set(&mut model.context, context);
        set(&mut model.layers, layers);
        set(&mut model.heads, heads);
        set(&mut model.d_model, d_model);
        set(&mut model.factorization, factorization);
        set(&mut model.block_size, block);
        set(&mut model.dropout, dropout);
        set(&mut model.init_scale, init_scale);
        set(&mut model.precision, precision);
        if !pattern.is_empty() {
            model.position_width = position_width_for(&pattern, model.context);
            model.patterns = pattern;
        }
        // The position embedding stays that of the sparse model, so that the two have the same parameters.
        if attention == Some(Attention::Dense) {
            model.patterns = vec!["causal".to_owned()];
            model.factorization = FactorizationKind::Merged;
        }
        set(&mut model.position_width, position_width);

        let recipe = &mut self.recipe;
        set(&mut recipe.batch, batch);
        set(&mut recipe.length, steps.map(Length::Steps));
        set(&mut recipe.length, epochs.map(Length::Epochs));
        set(&mut recipe.learning_rate, lr);
        set(&mut recipe.warmup, warmup);
        set(&mut recipe.weight_decay, weight_decay);
        set(&mut recipe.beta_1, beta1);
        set(&mut recipe.beta_2, beta2);
        set(&mut recipe.epsilon, epsilon);
        set(&mut recipe.clip, clip);
        set(&mut recipe.seed, seed);
        set(&mut recipe.recompute, recompute);
        set(&mut recipe.eval_every, eval_every);
        set(&mut recipe.eval_windows, eval_windows);
        set(&mut recipe.checkpoint_every, checkpoint_every);
        set(&mut recipe.log_every, log_every);
    }

    /// Errors name flags, where those of the layers would name the fields of their configurations.
    fn check(&self) -> Result<()> {
        let ModelConfig {
            context,
            heads,
            d_model,
            patterns,
            factorization,
            block_size,
            position_width,
            ..
        } = &self.model;
        ensure!(
            d_model % heads == 0,
            "--d-model must be a multiple of --heads, got {d_model} and {heads}"
        );
        ensure!(
            BLOCK_SIZES.contains(block_size),
            "--block must be 8, 16, 32, 64 or 128, got {block_size}"
        );
        ensure!(
            position_width <= context,
            "--position-width must be at most --context = {context}, got {position_width}; without that flag it is the stride of \
             --pattern, or the preset's"
        );
        ensure!(
            *factorization != FactorizationKind::MultiHead || heads % patterns.len() == 0,
            "--heads must be a multiple of the {} patterns of --factorization multi-head, got {heads}",
            patterns.len()
        );
        patterns.iter().try_for_each(|text| {
            check_pattern(text, *heads).with_context(|| format!("--pattern '{text}'"))
        })
    }
}

fn check_pattern(text: &str, heads: usize) -> Result<()> {
    let pattern: Pattern = text.parse()?;
    pattern.validate(heads)?;
    if pattern.is_causal() {
        return Ok(());
    }
    let causal = pattern::causal_part(text);
    match pattern::has_callback(&pattern) {
        true => bail!(
            "it is not known to be causal, because a part of it is a callback; '{causal}' is, and keeps the pairs that are"
        ),
        false => bail!(
            "it lets a position see later ones, so the model could read the byte it predicts; use a causal pattern \
             such as causal, local:W, strided:S or fixed:L,C, or '{causal}'"
        ),
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

/// The first field that differs, as `name value` on both sides.
fn first_difference(stored: &RunConfig, asked: &RunConfig) -> (String, String) {
    let flat = |config: &RunConfig| {
        let mut fields = vec![("preset".to_owned(), format!("{:?}", config.preset.name()))];
        for part in [
            serde_json::to_value(&config.model),
            serde_json::to_value(&config.recipe),
        ] {
            if let Ok(serde_json::Value::Object(map)) = part {
                fields.extend(
                    map.into_iter()
                        .map(|(name, value)| (name, value.to_string())),
                );
            }
        }
        fields
    };
    let difference = flat(stored)
        .into_iter()
        .zip(flat(asked))
        .find(|(stored, asked)| stored.1 != asked.1);
    match difference {
        Some((stored, asked)) => (
            format!("{} {}", stored.0, stored.1),
            format!("{} {}", asked.0, asked.1),
        ),
        None => ("its own configuration".to_owned(), "another".to_owned()),
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.replace('_', "").parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("must be a whole number, at least 1".to_owned()),
    }
}

/// A positive number.
pub fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && f64::is_finite(number) => Ok(number),
        _ => Err("must be a number above 0".to_owned()),
    }
}

/// `--precision`.
pub fn precision(text: &str) -> Result<Precision, String> {
    Precision::ALL
        .into_iter()
        .find(|precision| precision.name() == text)
        .ok_or_else(|| "must be f32, tf32 or bf16".to_owned())
}

fn non_negative(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number >= 0.0 && f64::is_finite(number) => Ok(number),
        _ => Err("must be a number, at least 0".to_owned()),
    }
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..1.0).contains(&number) => Ok(number),
        _ => Err("must be a number from 0 up to, not including, 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paper_preset_is_the_paper() {
        let config = RunConfig::new(Preset::Paper, &Overrides::default()).unwrap();
        let model = &config.model;
        assert_eq!(
            (model.context, model.layers, model.heads, model.d_model),
            (12_288, 30, 8, 512)
        );
        assert_eq!(
            (model.patterns[0].as_str(), model.dropout),
            ("fixed:128,32", 0.40)
        );
        assert_eq!(config.recipe.length, Length::Epochs(80.0));
        assert_eq!(config.steps(90_000_000), 73_242);
    }

    #[test]
    fn flags_override_and_stay() {
        let overrides = Overrides {
            layers: Some(2),
            steps: Some(7),
            pattern: vec!["local:16+strided:32".to_owned()],
            ..Overrides::default()
        };
        let config = RunConfig::new(Preset::Tiny, &overrides).unwrap();
        assert_eq!((config.model.layers, config.model.position_width), (2, 32));
        assert_eq!(config.steps(1_000), 7);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<RunConfig>(&text).unwrap(), config);
        let config = RunConfig::new(Preset::Paper, &Overrides::default()).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        let older = text.replace(",\"init_scale\":0.125,\"precision\":\"f32\"", "");
        assert_ne!(older, text);
        assert_eq!(serde_json::from_str::<RunConfig>(&older).unwrap(), config);
    }

    #[test]
    fn dense_attention_changes_nothing_else() {
        let sparse = RunConfig::new(Preset::Tiny, &Overrides::default()).unwrap();
        let overrides = Overrides {
            attention: Some(Attention::Dense),
            ..Overrides::default()
        };
        let mut dense = RunConfig::new(Preset::Tiny, &overrides).unwrap();
        assert_eq!(dense.model.patterns, ["causal"]);
        dense.model.patterns = sparse.model.patterns.clone();
        assert_eq!(dense, sparse);
    }

    #[test]
    fn patterns_that_look_ahead_are_refused() {
        let overrides = Overrides {
            pattern: vec!["local:8+prefix:4".to_owned()],
            ..Overrides::default()
        };
        let error = RunConfig::new(Preset::Tiny, &overrides).unwrap_err();
        let message = format!("{error:#}");
        assert!(message.contains("later"), "{message}");
    }

    #[test]
    fn resume_keeps_the_model_and_may_lengthen_the_run() {
        let config = RunConfig::new(Preset::Tiny, &Overrides::default()).unwrap();
        let longer = Overrides {
            steps: Some(5_000),
            ..Overrides::default()
        };
        assert_eq!(config.resumed(None, &longer).unwrap().steps(1), 5_000);
        let wider = Overrides {
            d_model: Some(256),
            ..Overrides::default()
        };
        let message = config.resumed(None, &wider).unwrap_err().to_string();
        assert!(
            message.contains("d_model 128") && message.contains("d_model 256"),
            "{message}"
        );
        assert!(
            config
                .resumed(Some(Preset::Small), &Overrides::default())
                .is_err()
        );
    }
}
