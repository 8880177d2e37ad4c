//! Description of a run at its beginning.

use anyhow::Result;
use burn::module::Module;
use burn_sparse_transformer::Selection;

use super::Session;
use crate::config::RunConfig;
use crate::data::{Split, thousands};
use crate::model;
use crate::presets::Preset;
use crate::progress::say;

impl Session {
    /// Prints the model and the recipe.
    pub(super) fn describe(&self) -> Result<()> {
        let RunConfig {
            preset,
            model,
            recipe,
        } = &self.config;
        let per_step = self.config.tokens_per_step();
        let train = (model.cut()).predictions(self.corpus.split(Split::Train).len());
        say(format!("data      {}", self.corpus.describe()));
        say(format!(
            "model     preset {preset}: {} parameters, {}, {}",
            thousands(self.training.steps().model()?.num_params()),
            model.sizes(),
            model.precision,
        ));
        say(format!(
            "attention {}, block size {}",
            model::factorization(model)?,
            model.block_size
        ));
        let leak = ": later bytes influence the choice (a small causal leak)";
        if let Some(content) = &model.content {
            let local = match &model.local_heads[..] {
                [] => (model.heads / 2).to_string(),
                heads => {
                    let heads: Vec<String> = heads.iter().map(ToString::to_string).collect();
                    heads.join(", ")
                }
            };
            let note = if content.is_prefix_stable() { "" } else { leak };
            say(match content.is_whole_layer() {
                true => format!("          keys of all heads chosen by {content}{note}"),
                false => format!(
                    "          in {local} local heads; keys of the others chosen by {content}{note}"
                ),
            });
        }
        if let Some(line) = self.config.describe_indexers() {
            say(format!("          {line}"));
        }
        let note = |selection: &Selection| match selection.estimator().traits().prefix_stable {
            true => "",
            false => leak,
        };
        for selection in &model.selections {
            let note = note(selection);
            say(format!("          keys chosen by {selection}{note}"));
        }
        for (way, heads) in model::ways_of_heads(model) {
            let (text, note) = (model::way_text(way), way.map_or("", note));
            let plural = if heads == 1 { "" } else { "s" };
            say(format!(
                "          keys of {heads} head{plural} chosen by {text}{note}"
            ));
        }
        if let Some(weights) = &model.ff_weights {
            say(format!("ff        block-sparse weights: {weights}"));
            if let Some(pruning) = &recipe.ff_prune {
                say(format!("          {pruning}"));
            }
        }
        say(format!(
            "recipe    {} steps of {} bytes ({:.1} epochs), {}",
            thousands(self.steps),
            thousands(per_step),
            self.steps as f64 * per_step as f64 / train as f64,
            self.config.rates(),
        ));
        if preset == &Preset::Paper {
            say(
                "          (the paper gives no learning rate or batch for enwik8: this is its CIFAR-10 rate, batch ours)",
            );
        }
        if let Some(line) = self.group.describe(recipe.batch) {
            say(line);
        }
        say(format!(
            "run       {}, on {}\n",
            self.folder.path().display(),
            self.device.name
        ));
        Ok(())
    }
}
