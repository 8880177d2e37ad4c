//! Configuration of a run: a preset with a user's changes, checked.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use burn_blocksparse::Pattern;
use burn_blocksparse::layout::BLOCK_SIZES;
use burn_fused_ops::sparse_linear::WEIGHT_BLOCK_SIZES;
use burn_sparse_transformer::Selection;
use burn_sparse_transformer::content::ContentAttention;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::data::thousands;
use crate::flags::ensure_all;
use crate::overrides::Overrides;
use crate::presets::{
    AttentionKind, BASE, FactorizationKind, FeedForwardWeights, Length, ModelConfig, Preset, Recipe,
};
use crate::{flags, pattern, search};

/// Definition of a run except its data. Stored in the run folder and in every checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunConfig {
    /// Preset that the values come from.
    pub preset: Preset,
    pub model: ModelConfig,
    pub recipe: Recipe,
}

impl RunConfig {
    /// Returns a preset unchanged.
    pub fn of(preset: Preset) -> Self {
        let (mut model, mut recipe) = (ModelConfig::base(preset.task()), Recipe::default());
        for flags in [BASE, preset.flags()] {
            let own = Overrides::read(flags).apply(&mut model, &mut recipe);
            own.expect("flags of ours");
        }
        RunConfig {
            preset,
            model,
            recipe,
        }
    }

    /// Returns a preset with the user's changes.
    pub fn new(preset: Preset, overrides: &Overrides) -> Result<Self> {
        let mut config = RunConfig::of(preset);
        ensure!(
            overrides.changes.attention != Some(AttentionKind::Dense)
                || !overrides.gives("pattern"),
            "--attention dense is a pattern by itself; leave out --pattern"
        );
        config.check_picture_flags(overrides)?;
        overrides.apply(&mut config.model, &mut config.recipe)?;
        config.check_content_flags(overrides)?;
        config.check()?;
        Ok(config)
    }

    /// Returns a stored configuration with the changes of a resumed run. Only changes that are consistent with the steps taken are allowed.
    ///
    /// # Errors
    /// Names the first flag that contradicts the run.
    pub fn resumed(&self, preset: Option<Preset>, overrides: &Overrides) -> Result<Self> {
        let mut wanted = self.clone();
        wanted.preset = preset.unwrap_or(self.preset);
        wanted.check_picture_flags(overrides)?;
        overrides.apply(&mut wanted.model, &mut wanted.recipe)?;
        wanted.check_content_flags(overrides)?;
        let allowed = RunConfig {
            recipe: Recipe {
                length: wanted.recipe.length,
                recompute: wanted.recipe.recompute,
                recall_every: wanted.recipe.recall_every,
                eval_every: wanted.recipe.eval_every,
                eval_windows: wanted.recipe.eval_windows,
                checkpoint_every: wanted.recipe.checkpoint_every,
                log_every: wanted.recipe.log_every,
                ..self.recipe.clone()
            },
            ..self.clone()
        };
        if let Some(difference) = first_difference(&allowed, &wanted, overrides) {
            bail!(
                "--resume continues the run as it was begun, {difference}; leave that flag out, or begin another run with --run DIR"
            );
        }
        wanted.check()?;
        Ok(wanted)
    }

    /// Returns the number of optimizer steps of the run, for a training split with `train_bytes` predicted bytes.
    pub fn steps(&self, train_bytes: usize) -> usize {
        match self.recipe.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => {
                let step = (self.recipe.batch * self.model.context) as f64;
                ((epochs * train_bytes as f64 / step) as usize).max(1)
            }
        }
    }

    /// Returns the density of the feed-forward networks' weights after `step` steps; `None` if they are dense.
    pub fn ff_density(&self, step: usize) -> Option<f64> {
        let initial = self.model.ff_weights?.density;
        Some(match &self.recipe.ff_prune {
            Some(pruning) => pruning.density_after(step, initial),
            None => initial,
        })
    }

    /// Returns whether layers choose their keys by content after `step` steps.
    pub fn chooses(&self, step: usize) -> bool {
        let is_over = (self.recipe.selection_until).is_some_and(|until| step >= until);
        self.model.chooses() && !is_over
    }

    /// Returns the bytes predicted in one step.
    pub fn tokens_per_step(&self) -> usize {
        self.recipe.batch * self.model.context
    }

    /// Formats learning rate, dropout and seed.
    pub fn rates(&self) -> String {
        format!(
            "lr {}, warm-up {}, dropout {}, seed {}",
            self.recipe.learning_rate,
            thousands(self.recipe.warmup),
            self.model.dropout,
            self.recipe.seed
        )
    }

    /// Rejects --graph with clusters and hashes: their means and rotations change in every step, and a recording would repeat the first ones.
    pub fn check_graph(&self, graph: bool) -> Result<()> {
        match &self.model.content {
            Some(content) if graph && !content.is_whole_layer() => bail!(
                "--graph records a step with the clusters or hashes that it has; leave it out with --attention {content}"
            ),
            _ => Ok(()),
        }
    }

    /// Checks that flags of images are given for images only, whose size determines the context.
    fn check_picture_flags(&self, overrides: &Overrides) -> Result<()> {
        if self.model.pictures.is_none() {
            ensure!(
                !overrides.changes.changes_pictures(),
                "--picture-size, --classes and --halve are of pictures; add --task images or --preset cifar"
            );
            return Ok(());
        }
        ensure_all! {
            !overrides.gives("context") && !overrides.gives("position-width") =>
                "a picture is a window, and a row of it one of the position matrix; leave out --context and --position-width, or \
                 give --picture-size";
            !overrides.gives("recall-every") => "--recall-every measures windows of text; leave it out";
        }
        Ok(())
    }

    /// Checks that flags of content-based heads are given with such heads only.
    fn check_content_flags(&self, overrides: &Overrides) -> Result<()> {
        let content = self.model.content.as_ref();
        let is_whole = content.is_some_and(ContentAttention::is_whole_layer);
        let has_means = matches!(content, Some(ContentAttention::Routing(_)));
        ensure_all! {
            content.is_some() || !overrides.gives("local-heads") =>
                "--local-heads are those next to content-based heads; add --attention routing:WINDOW or lsh:BUCKET,ROUNDS";
            !is_whole || !overrides.gives("local-heads") =>
                "--attention {} is all heads of a layer; leave out --local-heads",
                content.map(ToString::to_string).unwrap_or_default();
            has_means || !(overrides.gives("commitment") || overrides.gives("means-decay")) =>
                "--commitment and --means-decay are of clusters; add --attention routing:WINDOW";
        }
        self.check_indexers(overrides)
    }

    /// Checks the configuration. Errors name flags, where those of the layers would name fields.
    fn check(&self) -> Result<()> {
        let ModelConfig {
            context,
            heads,
            d_model,
            patterns,
            factorization,
            block_size,
            position_width,
            d_ff,
            d_key,
            ff_weights,
            content,
            local_heads,
            kv_heads,
            layers,
            ..
        } = &self.model;
        let chooses = self.model.chooses();
        ensure_all! {
            d_model % heads == 0 => "--d-model must be a multiple of --heads, got {d_model} and {heads}";
            d_key.is_none_or(|width| width % heads == 0) =>
                "--d-key must be a multiple of --heads, got {} and {heads}", d_key.unwrap_or_default();
            kv_heads.is_none_or(|count| heads % count == 0) =>
                "--kv-heads must be a divisor of --heads = {heads}, got {}", kv_heads.unwrap_or_default();
            BLOCK_SIZES.contains(block_size) => "--block must be 8, 16, 32, 64 or 128, got {block_size}";
            position_width <= context =>
                "--position-width must be at most --context = {context}, got {position_width}; without that flag it is the stride of \
                 --pattern, or the preset's";
            *factorization != FactorizationKind::MultiHead || heads % patterns.len() == 0 =>
                "--heads must be a multiple of the {} patterns of --factorization multi-head, got {heads}", patterns.len();
        }
        if let Some(content) = content {
            ensure_all! {
                !chooses =>
                    "--selection and --attention {content} are two ways to choose; leave out one of them";
                [0, 1, *layers].contains(&local_heads.len()) =>
                    "--local-heads must be one number, or {layers}, one for each of --layers, got {}", local_heads.len();
                local_heads.iter().all(|count| (1..=*heads).contains(count))
                    && (*heads > 1 || content.is_whole_layer()) =>
                    "--local-heads must be from 1 to --heads = {heads}, and there must be two heads at least, got {local_heads:?}";
                kv_heads.is_none() || content.is_whole_layer() =>
                    "--kv-heads are of heads whose keys are not their queries; leave it out with --attention {content}";
            }
        }
        if let Some(FeedForwardWeights { block, density, .. }) = ff_weights {
            if let Some(pruning) = &self.recipe.ff_prune {
                pruning.check(*density)?;
            }
            ensure_all! {
                WEIGHT_BLOCK_SIZES.contains(block) => "--ff-block must be 16, 32, 64 or 128, got {block}";
                d_model.is_multiple_of(*block) =>
                    "--ff-block must be a divisor of --d-model = {d_model}, got {block}";
                d_ff.is_none_or(|width| width.is_multiple_of(*block)) =>
                    "--ff-block must be a divisor of --d-ff = {}, got {block}", d_ff.unwrap_or_default();
            }
        }
        self.check_memory(None)?;
        self.check_choices()?;
        ensure!(
            chooses || self.recipe.recall_every.is_none() && self.recipe.selection_until.is_none(),
            "--recall-every and --selection-until are of a choice by content; add --selection or --selection-file"
        );
        patterns.iter().try_for_each(|text| {
            check_pattern(text, *heads).with_context(|| format!("--pattern '{text}'"))
        })
    }
}

impl RunConfig {
    /// Checks that selections support the patterns they choose from.
    fn check_choices(&self) -> Result<()> {
        let model = &self.model;
        let by_byte = |selection: &&Selection| selection.estimator().grid().query_rows == 1;
        let by_byte = model.all_selections().find(by_byte);
        if let Some(selection) = by_byte.filter(|_| !model.sees_everything()) {
            bail!(
                "--selection {selection}: every byte chooses for itself, from every earlier one, and not within the pattern {}; leave out --pattern and \
                 --attention sparse, or choose for blocks of bytes together, as with topk",
                model.patterns.join(" / ")
            );
        }
        if model.head_selections.is_empty() {
            return Ok(());
        }
        search::check_heads(&model.head_selections, model.layers, model.heads)?;
        ensure!(
            model.factorization != FactorizationKind::MultiHead || model.patterns.len() == 1,
            "--selection-file selects for each head within a pattern that all heads share; leave out --factorization multi-head"
        );
        Ok(())
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

/// Returns the first field that differs, with its flag and the requested value, or `None`.
fn first_difference(
    stored: &RunConfig,
    asked: &RunConfig,
    overrides: &Overrides,
) -> Option<String> {
    if stored == asked {
        return None;
    }
    let [before, now] = [stored, asked].map(fields);
    let names = before.keys().chain(now.keys());
    let of = |fields: &BTreeMap<String, Value>, name: &str| {
        shown(fields.get(name).unwrap_or(&Value::Null))
    };
    let mut names = names.filter(|name| of(&before, name) != of(&now, name));
    let name = names.next().map_or("preset", String::as_str);
    let (stored, asked) = (of(&before, name), of(&now, name));
    let flag = flags::of(name);
    let given = flags::all_of(name)
        .iter()
        .find(|flag| overrides.gives(flag));
    Some(match given {
        Some(other) if **other != flag => {
            format!("with --{flag} {stored}, but --{other} makes that {asked}")
        }
        _ => format!("with --{flag} {stored}, but --{flag} {asked} was asked for"),
    })
}

/// Returns all fields of a configuration by name; fields with flags of their own are `name.inner`.
pub fn fields(config: &RunConfig) -> BTreeMap<String, Value> {
    let preset = Value::from(config.preset.to_string());
    let mut fields = BTreeMap::from([("preset".to_owned(), preset)]);
    let [model, recipe] = [
        serde_json::to_value(&config.model),
        serde_json::to_value(&config.recipe),
    ];
    for part in [model, recipe].into_iter().flatten() {
        for (name, value) in part.as_object().into_iter().flatten() {
            match value.as_object() {
                Some(inner) if ["pictures", "ff_weights", "ff_prune"].contains(&&**name) => {
                    let inner = inner.iter();
                    fields.extend(inner.map(|(of, value)| (format!("{name}.{of}"), value.clone())));
                }
                _ => fields.extend([(name.clone(), value.clone())]),
            }
        }
    }
    fields
}

/// Formats a value in the syntax of its flag.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "none".to_owned(),
        Value::Array(values) => values.iter().map(shown).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

#[cfg(test)]
impl RunConfig {
    /// Returns a preset with the flags of a command line.
    pub fn read(preset: Preset, flags: &str) -> Result<Self> {
        Self::new(preset, &Overrides::read(flags))
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, ValueEnum};

    use super::*;

    /// The recipe of docs/sparse-or-dense.md, by its flags.
    #[test]
    fn long_is_the_recipe_of_eighteen_minutes() {
        let paper = RunConfig::read(Preset::Paper, "--batch 4 --dropout 0.3 --init-scale 1 --warmup 200 --lr 7e-4 --recompute none --eval-every 250 --eval-windows 8 --steps 8400").unwrap();
        let long = RunConfig::read(Preset::Long, "").unwrap();
        assert_eq!((long.model, long.recipe), (paper.model, paper.recipe));
    }

    #[test]
    fn presets_keep_their_earlier_names() {
        let of_flag = Preset::from_str("hour", false).unwrap();
        let stored: Preset = serde_json::from_str("\"hour\"").unwrap();
        assert_eq!([of_flag, stored], [Preset::FourMb; 2]);
        for preset in Preset::value_variants() {
            let written = serde_json::to_value(preset).unwrap();
            assert_eq!(written, preset.to_string());
        }
    }

    #[test]
    fn the_paper_preset_is_the_paper() {
        let config = RunConfig::read(Preset::Paper, "").unwrap();
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
    #[cfg(feature = "flex")]
    fn the_cifar_preset_is_the_paper() {
        let config = RunConfig::read(Preset::Cifar, "").unwrap();
        let model = &config.model;
        assert_eq!(
            (model.context, model.layers, model.heads, model.d_model),
            (3_072, 128, 2, 256)
        );
        assert_eq!((model.d_key, model.d_ff), (Some(128), Some(512)));
        assert_eq!(model.patterns, ["local:96", "strided:96"]);
        assert_eq!(
            (model.dropout, config.recipe.learning_rate),
            (0.25, 0.00035)
        );
        assert_eq!(config.recipe.length, Length::Epochs(120.0));
        use burn::module::Module;
        let layers = crate::model::transformer(model).unwrap();
        let parameters = layers
            .try_init(&burn::tensor::Device::flex())
            .unwrap()
            .num_params();
        // The paper's "59M".
        assert_eq!(parameters / 1_000_000, 59, "{parameters}");
    }

    #[test]
    fn pictures_decide_context_and_pattern() {
        let overrides = Overrides::read("--picture-size 8 --halve");
        let config = RunConfig::new(Preset::Shapes, &overrides).unwrap();
        let model = &config.model;
        let pictures = model.pictures.unwrap();
        assert_eq!(
            (pictures.side, pictures.classes, pictures.halved),
            (8, 6, true)
        );
        assert_eq!((model.context, model.position_width), (192, 24));
        assert_eq!(model.patterns, ["local:24+strided:24"]);
        let config = RunConfig::read(Preset::Shapes, "--classes 3 --pattern fixed:48,12").unwrap();
        assert_eq!(
            (config.model.context, config.model.position_width),
            (768, 48)
        );
        assert_eq!(config.model.patterns, ["fixed:48,12"]);
        let resumed = config.resumed(None, &Overrides::read("")).unwrap();
        assert_eq!(resumed, config);
        let message = config.resumed(None, &overrides).unwrap_err().to_string();
        assert!(message.contains("--resume continues the run"), "{message}");
        for wrong in [
            Overrides::read("--context 768"),
            Overrides::read("--position-width 48"),
        ] {
            assert!(RunConfig::new(Preset::Shapes, &wrong).is_err());
        }
    }

    #[test]
    fn presets_by_content_are_lucidrains_scripts() {
        let local = |window: usize| vec![format!("local:{window}")];
        for (preset, content, heads, patterns) in [
            (
                Preset::Routing,
                "routing:128",
                vec![8, 8, 8, 4, 4, 4],
                local(128),
            ),
            (Preset::Reformer, "lsh:64,4", vec![4], local(128)),
        ] {
            let config = RunConfig::read(preset, "").unwrap();
            let model = &config.model;
            assert_eq!(model.content, Some(content.parse().unwrap()));
            assert_eq!((&model.local_heads, &model.patterns), (&heads, &patterns));
            let shape = (model.context, model.layers, model.heads, model.d_model);
            assert_eq!(shape, (4_096, 6, 8, 512));
            assert_eq!(
                (config.recipe.batch, config.recipe.learning_rate),
                (4, 1e-4)
            );
            let flags = Overrides::read(&format!("--attention {content}"));
            // By default half of the heads are local, in other presets too.
            for preset in [preset, Preset::Small] {
                let config = RunConfig::new(preset, &flags).unwrap();
                assert_eq!(config.model.content, model.content);
                assert!(config.model.local_heads.is_empty());
            }
            let dense = RunConfig::read(preset, "--attention dense").unwrap().model;
            assert_eq!(
                (dense.content, dense.patterns),
                (None, vec!["causal".to_owned()])
            );
        }
        // A checkpoint from before there were such heads.
        let config = RunConfig::read(Preset::Tiny, "").unwrap();
        let text = serde_json::to_string(&config).unwrap();
        let older = text.replace(",\"content\":null,\"local_heads\":[]", "");
        assert_ne!(older, text);
        assert_eq!(serde_json::from_str::<RunConfig>(&older).unwrap(), config);
    }

    #[test]
    fn flags_override_and_stay() {
        let config = RunConfig::read(
            Preset::Tiny,
            "--layers 2 --steps 7 --pattern local:16+strided:32",
        )
        .unwrap();
        assert_eq!((config.model.layers, config.model.position_width), (2, 32));
        assert_eq!(config.steps(1_000), 7);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<RunConfig>(&text).unwrap(), config);
        let config = RunConfig::read(Preset::Paper, "--recompute block").unwrap();
        let text = serde_json::to_string(&config).unwrap();
        let older = text.replace(",\"init_scale\":0.125,\"precision\":\"f32\"", "");
        assert_ne!(older, text);
        let oldest = older.replace("\"recompute\":\"block\"", "\"recompute\":true");
        assert_ne!(oldest, older);
        assert_eq!(serde_json::from_str::<RunConfig>(&oldest).unwrap(), config);
        assert_eq!(serde_json::from_str::<RunConfig>(&older).unwrap(), config);
    }

    /// Without a pattern selections choose from every earlier byte, with `--attention sparse` from the preset's pattern.
    #[test]
    fn flags_of_choices_arrive() {
        for (flags, pattern) in [("", "causal"), ("--attention sparse", "fixed:32,8")] {
            let flags = format!("--selection topk:8,3 {flags}");
            let model = RunConfig::read(Preset::Tiny, &flags).unwrap().model;
            assert_eq!(model.patterns, [pattern]);
            assert_eq!(model.selections, ["topk:8,3".parse().unwrap()]);
        }
        let flags = "--attention routing:16 --means-decay 0.5 --commitment 10";
        let model = RunConfig::read(Preset::Tiny, flags).unwrap().model;
        let Some(ContentAttention::Routing(routing)) = model.content else {
            panic!("no clusters");
        };
        assert_eq!((routing.means_decay, routing.commitment), (0.5, 10.0));
    }

    #[test]
    fn dense_attention_changes_nothing_else() {
        let sparse = RunConfig::read(Preset::Tiny, "").unwrap();
        let overrides = Overrides::read("--attention dense");
        let mut dense = RunConfig::new(Preset::Tiny, &overrides).unwrap();
        assert_eq!(dense.model.patterns, ["causal"]);
        dense.model.patterns = sparse.model.patterns.clone();
        assert_eq!(dense, sparse);
    }

    /// The message names the flag that contradicts the run.
    #[test]
    fn resume_names_the_flag_that_contradicts() {
        let runs = [
            (Preset::Tiny, ""),
            (Preset::Shapes, ""),
            (Preset::Tiny, "--selection topk:16,4"),
            (Preset::Tiny, "--attention routing:32"),
            (Preset::Tiny, "--attention dsa:32,4,2,8 --indexer-warmup 5"),
            (
                Preset::Tiny,
                "--ff-density 0.5 --ff-prune 0.25 --ff-prune-until 1000",
            ),
        ];
        // Each flag, with the index of the run it belongs to and its arguments.
        let nine = format!("9 {}", runs[5].1);
        let flags = [
            (0, "context", "128"),
            (0, "layers", "3"),
            (0, "heads", "8"),
            (0, "kv-heads", "2"),
            (0, "d-model", "64"),
            (0, "attention", "dense"),
            (3, "attention", "routing:64"),
            (3, "local-heads", "1"),
            (3, "commitment", "0.5"),
            (3, "means-decay", "0.5"),
            (0, "pattern", "local:32"),
            (0, "pattern", "fixed:64,8"),
            (0, "selection", "topk:16,4"),
            (2, "selection", "topk:16,2"),
            (2, "selection-full-last", "1 --selection topk:16,4"),
            (2, "share-every", "2"),
            (0, "factorization", "interleaved"),
            (0, "block", "32"),
            (0, "position-width", "64"),
            (0, "dropout", "0.5"),
            (0, "init-scale", "0.5"),
            (0, "precision", "bf16"),
            (0, "d-ff", "256"),
            (0, "d-key", "64"),
            (0, "softmax-threshold", "20"),
            (1, "picture-size", "8"),
            (1, "classes", "3"),
            (1, "halve", ""),
            (0, "ff-density", "0.5"),
            (5, "ff-density", "0.75"),
            (5, "ff-block", "32 --ff-density 0.5"),
            (5, "ff-layout", "banded --ff-density 0.5"),
            (
                5,
                "ff-prune",
                "0.125 --ff-density 0.5 --ff-prune-until 1000",
            ),
            (5, "ff-prune-from", &nine),
            (5, "ff-prune-until", "999 --ff-density 0.5 --ff-prune 0.25"),
            (5, "ff-prune-every", &nine),
            (0, "batch", "8"),
            (0, "lr", "0.5"),
            (0, "warmup", "9"),
            (0, "weight-decay", "0.5"),
            (0, "beta1", "0.5"),
            (0, "beta2", "0.5"),
            (0, "epsilon", "0.5"),
            (0, "clip", "0.5"),
            (0, "seed", "9"),
            (2, "selection-until", "9"),
            (4, "indexer-warmup", "9"),
            (4, "indexer-lr", "0.5"),
            (4, "indexer-from", "9"),
        ];
        let tiny = RunConfig::read(Preset::Tiny, "").unwrap();
        let other = tiny.resumed(Some(Preset::Small), &Overrides::read(""));
        assert!(other.is_err());
        for (run, flag, value) in flags {
            let (preset, begun) = runs[run];
            let config = RunConfig::read(preset, begun).unwrap();
            let asked = Overrides::read(&format!("--{flag} {value}"));
            let error = config.resumed(None, &asked).unwrap_err().to_string();
            let is_named = error.contains(&format!("but --{flag} "));
            assert!(is_named, "--{flag} {value}: {error}");
        }
        let may_change = [
            "steps",
            "epochs",
            "recompute",
            "recall-every",
            "eval-every",
            "eval-windows",
            "checkpoint-every",
            "log-every",
        ];
        // Needs a file: covered by the tests of the program.
        let known = [&may_change[..], &["selection-file"]].concat();
        for argument in Overrides::augment_args(Command::new("flags")).get_arguments() {
            let name = argument.get_long().unwrap();
            assert!(
                known.contains(&name) || flags.iter().any(|(_, flag, _)| *flag == name),
                "--{name}"
            );
        }
    }
}
