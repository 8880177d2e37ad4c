//! Training stage of indexers (`dsa`, `msa`): a function of the step, so that a resumed run needs no state of it.
//!
//! ```text
//! --indexer-from steps     dense attention; the model alone learns
//! --indexer-warmup steps   dense attention; the indexers alone learn, at --indexer-lr
//! behind them              attention to what the indexers choose; both learn
//! ```

use anyhow::{Result, ensure};
use burn_sparse_transformer::SparseTransformer;
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::dsa::DsaStage;

use crate::config::RunConfig;
use crate::data::thousands;
use crate::flags::ensure_all;
use crate::overrides::Overrides;
use crate::presets::Recipe;
use crate::schedule::Schedule;

/// Sets the stage of the model's indexers after `step` steps.
pub fn staged(
    model: SparseTransformer,
    config: &RunConfig,
    step: usize,
) -> Result<SparseTransformer> {
    Ok(match config.dsa_stage(step) {
        Some(stage) => model.with_dsa_stage(stage)?,
        None => model,
    })
}

impl RunConfig {
    /// Returns the training stage of indexers after `step` steps, if layers have some.
    pub fn dsa_stage(&self, step: usize) -> Option<DsaStage> {
        let Some(ContentAttention::Dsa(_) | ContentAttention::Msa(_)) = self.model.content else {
            return None;
        };
        let from = self.recipe.indexer_from;
        Some(match step {
            _ if step < from => DsaStage::Dense,
            _ if step < from + self.recipe.indexer_warmup => DsaStage::WarmUp,
            _ => DsaStage::Sparse,
        })
    }

    /// Returns the learning rate of a step, counted from 0. In the warm-up of indexers it is theirs, or the peak, and the model's schedule is suspended
    /// meanwhile.
    pub fn learning_rate(&self, step: usize, steps: usize) -> f64 {
        let from = self.recipe.indexer_from;
        let until = from + self.recipe.indexer_warmup;
        // Number of earlier steps of the indexers' warm-up.
        let by_indexers = |step: usize| step.clamp(from, until) - from;
        if self.dsa_stage(step) == Some(DsaStage::WarmUp) {
            return (self.recipe.indexer_rate).unwrap_or(self.recipe.learning_rate);
        }
        let schedule = Schedule {
            peak: self.recipe.learning_rate,
            warmup: self.recipe.warmup,
            steps: steps - by_indexers(steps),
        };
        schedule.learning_rate(step - by_indexers(step))
    }

    /// Returns the stage that begins after a step, with a message for the user.
    pub fn stage_begun(&self, step: usize) -> Option<(DsaStage, &'static str)> {
        let stage = self.dsa_stage(step)?;
        let is_new = self.dsa_stage(step - 1) != Some(stage);
        let what = match stage {
            DsaStage::WarmUp => "the indexers alone learn, by dense attention",
            _ => "layers attend to the keys that their indexers choose",
        };
        is_new.then_some((stage, what))
    }

    /// Returns the indexers' mean loss over layers, if the auxiliary loss is theirs.
    pub fn indexer_loss(&self, aux_loss: Option<f64>) -> Option<f64> {
        self.dsa_stage(0)?;
        aux_loss.map(|sum| sum / self.model.layers as f64)
    }

    /// Returns a note for the user if the indexers of a checkpoint do not choose yet.
    pub fn stage_note(&self, step: usize) -> Option<String> {
        let stage = self.dsa_stage(step)?;
        (stage != DsaStage::Sparse).then(|| {
            let step = thousands(step);
            format!(
                "after step {step} layers see all earlier bytes: their indexers do not choose yet"
            )
        })
    }

    /// Checks that flags of indexers are given with indexers only, which choose from all earlier bytes.
    pub fn check_indexers(&self, overrides: &Overrides) -> Result<()> {
        let Some(content @ (ContentAttention::Dsa(_) | ContentAttention::Msa(_))) =
            &self.model.content
        else {
            ensure!(
                !["indexer-warmup", "indexer-from", "indexer-lr"]
                    .iter()
                    .any(|flag| overrides.gives(flag)),
                "--indexer-warmup, --indexer-lr and --indexer-from are of an indexer; add --attention dsa:KEEP,NEAR or msa:BLOCK,KEEP"
            );
            return Ok(());
        };
        ensure_all! {
            self.model.sees_everything() =>
                "--attention {content} chooses from all earlier bytes; leave out --pattern";
            self.recipe.indexer_warmup > 0 || self.recipe.indexer_from == 0 =>
                "--indexer-from is where the warm-up of indexers begins; add --indexer-warmup STEPS";
            self.recipe.indexer_warmup > 0 || self.recipe.indexer_rate.is_none() =>
                "--indexer-lr is the rate of the warm-up of indexers; add --indexer-warmup STEPS";
        }
        Ok(())
    }

    /// Describes the training of indexers, if there are some.
    pub fn describe_indexers(&self) -> Option<String> {
        let (kept, what) = match &self.model.content {
            Some(ContentAttention::Dsa(dsa)) => (dsa.keep, "KEEP is"),
            Some(ContentAttention::Msa(msa)) => {
                (msa.block.saturating_mul(msa.keep), "BLOCK · KEEP is")
            }
            _ => return None,
        };
        let Recipe {
            indexer_from: from,
            indexer_warmup: warmup,
            indexer_rate: rate,
            ..
        } = self.recipe;
        let rate = rate.map_or(String::new(), |rate| format!(" at {rate}"));
        let until = from + warmup;
        let dense = match from {
            0 => String::new(),
            _ => format!("dense attention for {} steps, ", thousands(from)),
        };
        let all = match kept >= self.model.context {
            true => format!("; they choose all bytes, because {what} not below --context"),
            false => String::new(),
        };
        Some(match warmup {
            0 => format!("indexers learn with the model from the first step on{all}"),
            _ => format!(
                "{dense}indexers alone learn for {}{rate}, and choose from step {} on{all}",
                thousands(warmup),
                thousands(until)
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::Preset;

    #[test]
    fn stages_and_rates_follow_the_step() {
        let flags =
            "--attention dsa:32,4,2,8 --indexer-from 10 --indexer-warmup 5 --warmup 4 --lr 1.0";
        let config = RunConfig::read(Preset::Tiny, flags).unwrap();
        let stages = [0, 9, 10, 14, 15, 99].map(|step| config.dsa_stage(step).unwrap());
        let [dense, warm_up, sparse] = [DsaStage::Dense, DsaStage::WarmUp, DsaStage::Sparse];
        assert_eq!(stages, [dense, dense, warm_up, warm_up, sparse, sparse]);
        let begun = |step| config.stage_begun(step).map(|(stage, _)| stage);
        let begun: Vec<_> = (1..20)
            .filter_map(|step| Some((step, begun(step)?)))
            .collect();
        assert_eq!(begun, [(10, warm_up), (15, sparse)]);
        let notes = [9, 14, 15].map(|step| config.stage_note(step).is_some());
        assert_eq!(notes, [true, true, false]);
        let described = config.describe_indexers().unwrap();
        assert!(described.ends_with("choose from step 15 on"), "{described}");
        let all = RunConfig::read(Preset::Tiny, "--attention dsa").unwrap();
        let described = all.describe_indexers().unwrap();
        assert!(described.contains("they choose all bytes"), "{described}");
        // The model's rates are those of a run without the warm-up of indexers.
        let rate = |step| config.learning_rate(step, 25);
        let own = Schedule {
            peak: 1.0,
            warmup: 4,
            steps: 20,
        };
        for step in 0..10 {
            assert_eq!(rate(step), own.learning_rate(step));
            assert_eq!(rate(step + 15), own.learning_rate(step + 10));
        }
        assert!((10..15).all(|step| rate(step) == 1.0));
        // The indexers' rate applies in the warm-up only.
        let own_rate = format!("{flags} --indexer-lr 0.25");
        let own_rate = RunConfig::read(Preset::Tiny, &own_rate).unwrap();
        for step in 0..25 {
            let is_theirs = (10..15).contains(&step);
            let expected = if is_theirs { 0.25 } else { rate(step) };
            assert_eq!(own_rate.learning_rate(step, 25), expected);
        }
        let described = own_rate.describe_indexers().unwrap();
        assert!(described.contains("learn for 5 at 0.25"), "{described}");
        // A run that ends in the warm-up, and models without indexers.
        assert_eq!(config.learning_rate(3, 12), 1.0);
        let plain = RunConfig::read(Preset::Tiny, "").unwrap();
        assert_eq!((plain.dsa_stage(3), plain.stage_begun(3)), (None, None));
    }
}
