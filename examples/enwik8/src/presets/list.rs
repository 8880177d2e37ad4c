//! `enwik8 presets`: lists the presets.

use clap::{Args, ValueEnum};

use super::{Length, Preset};
use crate::config::RunConfig;
use crate::data::thousands;
use crate::model::attention_text;
use crate::table::table;

/// List the presets: models, recipes, and what training takes where it was measured
#[derive(Args, Debug)]
#[command(after_help = "Examples:
  enwik8 presets

Each value has a flag of train, bench and import.")]
pub struct PresetsArgs {}

const MODEL: &str = "model  layers  heads  width  context  attention  block  dropout";
const RECIPE: &str = "recipe  batch  length  rate  warm-up  decay  recompute";

pub fn list() -> String {
    let (mut models, mut recipes, mut uses) = (Vec::new(), Vec::new(), Vec::new());
    for preset in Preset::value_variants() {
        let name = preset.to_string();
        let RunConfig { model, recipe, .. } = RunConfig::of(*preset);
        models.push([
            name.clone(),
            model.layers.to_string(),
            model.heads.to_string(),
            model.d_model.to_string(),
            thousands(model.context),
            attention_text(&model),
            model.block_size.to_string(),
            model.dropout.to_string(),
        ]);
        recipes.push([
            name.clone(),
            recipe.batch.to_string(),
            match recipe.length {
                Length::Steps(steps) => format!("{} steps", thousands(steps)),
                Length::Epochs(epochs) => format!("{epochs} epochs"),
            },
            recipe.learning_rate.to_string(),
            thousands(recipe.warmup),
            recipe.weight_decay.to_string(),
            recipe.recompute.to_string(),
        ]);
        let value = preset.to_possible_value();
        let help = value.and_then(|value| value.get_help().map(ToString::to_string));
        uses.push(format!("{name:<10}{}", help.unwrap_or_default()));
        uses.extend((preset.measured()).map(|measured| format!("{:10}{measured}", "")));
    }
    let (models, recipes) = (table(MODEL, &models), table(RECIPE, &recipes));
    format!("{models}\n\n{recipes}\n\n{}", uses.join("\n"))
}
