//! `enwik8 presets`.

use clap::{Args, ValueEnum};

use super::{Length, Preset};
use crate::data::thousands;
use crate::model::attention_text;
use crate::table::table;

/// List the presets: models, recipes, and what their training takes
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 presets

Each value has a flag of train, bench and import.")]
pub struct PresetsArgs {}

/// What is printed: shapes, recipes, and what each is for.
pub fn list() -> String {
    let presets = Preset::value_variants();
    let models = presets.iter().map(|preset| {
        let model = preset.model();
        [
            preset.name().to_owned(),
            model.layers.to_string(),
            model.heads.to_string(),
            model.d_model.to_string(),
            thousands(model.context),
            attention_text(&model),
            model.block_size.to_string(),
            model.dropout.to_string(),
        ]
    });
    let models: Vec<_> = models.collect();
    let recipes = presets.iter().map(|preset| {
        let recipe = preset.recipe();
        [
            preset.name().to_owned(),
            recipe.batch.to_string(),
            match recipe.length {
                Length::Steps(steps) => format!("{} steps", thousands(steps)),
                Length::Epochs(epochs) => format!("{epochs} epochs"),
            },
            recipe.learning_rate.to_string(),
            thousands(recipe.warmup),
            recipe.weight_decay.to_string(),
            recipe.recompute.to_string(),
        ]
    });
    let recipes: Vec<_> = recipes.collect();
    let uses = presets.iter().map(|preset| {
        let value = preset.to_possible_value();
        let help = value.and_then(|value| value.get_help().map(ToString::to_string));
        let measured = preset.measured();
        let measured = measured.map(|text| format!("\n{:10}{text}", ""));
        format!(
            "{:<10}{}{}",
            preset.name(),
            help.unwrap_or_default(),
            measured.unwrap_or_default()
        )
    });
    let uses: Vec<String> = uses.collect();
    [
        table(
            [
                "model",
                "layers",
                "heads",
                "width",
                "context",
                "attention",
                "block",
                "dropout",
            ],
            &models,
        ),
        table(
            [
                "recipe",
                "batch",
                "length",
                "rate",
                "warm-up",
                "decay",
                "recompute",
            ],
            &recipes,
        ),
        uses.join("\n"),
    ]
    .join("\n\n")
}
