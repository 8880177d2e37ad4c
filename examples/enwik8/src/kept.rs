//! Which keys a cache keeps: `--cache`, `--budget` and `--slack`.

use anyhow::{Error, Result, anyhow, bail, ensure};
use burn::tensor::FloatDType;
use burn_paged_attention::PoolError;
use burn_paged_attention::pages::CacheError;
use burn_paged_attention::pool::{CachePolicy, EvictionBudget, KvDtype, KvPositions};
use burn_sparse_transformer::{Selection, SparseTransformer, TransformerError};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::presets::ModelConfig;
use crate::search::{self, HeadChoices};
use crate::{arguments, model, notation};

/// The heading of their flags.
pub const CACHE: &str = "Cache of keys and values";

/// Flags of what is kept.
#[derive(Args, Debug)]
#[command(next_help_heading = CACHE)]
pub struct KeptArgs {
    /// Keys that the cache keeps: all, those that later bytes reach (reachable), a window:W,S, or of each layer and head those that a policy as snapkv:512
    /// leaves (`enwik8 patterns` lists them)
    #[arg(long, value_name = "POLICY", value_parser = kept)]
    cache: Option<Cache>,
    /// How the keys that stay are shared out: uniform, pyramid:BETA (the fewer the later the layer), or adaptive:ALPHA (by the heads' scores)
    #[arg(long, value_name = "BUDGET", value_parser = budget)]
    budget: Option<EvictionBudget>,
    /// Evict when there are N keys more than are kept [default: 256]
    #[arg(long, value_name = "N", value_parser = arguments::whole)]
    slack: Option<usize>,
    /// Positions that rotations are of, with window:W,S: those of the bytes, or of what is kept of them
    #[arg(long, value_name = "KIND", default_value = "original", value_parser = positions())]
    pub positions: KvPositions,
    /// How the keys and values that are kept are stored: int8 and fp8 take half the room of bf16
    #[arg(long, value_name = "DTYPE", default_value = "model", value_parser = kv_dtype())]
    pub kv_dtype: KvDtype,
    /// Attend to pages of keys that each byte chooses, by layer in turn; the cache keeps all of them. Only what no later
    /// byte takes part in, as quest:PAGE,BUDGET and moba:BLOCK,K
    #[arg(long, value_name = "TEXT", value_parser = notation::selection)]
    pub selection: Vec<Selection>,
    /// A choice of keys for each head, as search-selection writes it. To write, prompts alone are read by it, and each byte that follows attends to all
    /// keys that the cache keeps; to evaluate, whole windows are, without a cache
    #[arg(long, value_name = "FILE", value_parser = search::head_choices, conflicts_with = "selection")]
    pub selection_file: Option<HeadChoices>,
}

fn positions() -> impl TypedValueParser<Value = KvPositions> {
    PossibleValuesParser::new(["original", "in-cache"]).map(|name| match name.as_str() {
        "in-cache" => KvPositions::InCache,
        _ => KvPositions::Original,
    })
}

fn kv_dtype() -> impl TypedValueParser<Value = KvDtype> {
    let names = ["model", "f32", "f16", "bf16", "int8", "fp8"];
    PossibleValuesParser::new(names).map(|name| match name.as_str() {
        "f32" => FloatDType::F32.into(),
        "f16" => FloatDType::F16.into(),
        "bf16" => FloatDType::BF16.into(),
        "int8" => KvDtype::Int8,
        "fp8" => KvDtype::Fp8E4m3,
        _ => KvDtype::Model,
    })
}

impl KeptArgs {
    /// The model with the choice of `--selection` or `--selection-file`, and without one of its own.
    pub fn chosen(
        &self,
        model: SparseTransformer,
        config: &ModelConfig,
    ) -> Result<SparseTransformer> {
        if let Some(choices) = &self.selection_file {
            return choices.switched_on(model);
        }
        if self.selection.is_empty() {
            return model::without_selections(model);
        }
        for selection in &self.selection {
            let traits = selection.estimator().traits();
            ensure!(
                traits.prefix_stable && selection.estimator().page_summary().is_some(),
                "--selection {selection}: what a byte chooses depends on later ones, which a cache does not know; quest and moba choose by earlier bytes"
            );
        }
        let chosen = model.with_selections(&self.selection, 0);
        chosen.map_err(|error| self.explained(error.into(), config))
    }

    /// An error of the model or of its pool. Where a flag needs a pattern that the model has not, the flag and what to do instead.
    pub fn explained(&self, error: Error, config: &ModelConfig) -> Error {
        let of_pool = error.downcast_ref::<PoolError>();
        let of_layers = match of_pool {
            Some(PoolError::Layers(error)) => Some(error),
            _ => error.downcast_ref::<TransformerError>(),
        };
        let of_books = matches!(
            of_pool,
            Some(PoolError::Cache(CacheError::Argument {
                argument: "pattern",
                ..
            }))
        );
        let of_layers = matches!(
            of_layers,
            Some(TransformerError::Argument {
                argument: "pattern",
                ..
            })
        );
        let (flag, instead) = match &self.cache {
            Some(Cache { text, .. }) if of_books => {
                (format!("--cache {text}"), ", or take --cache reachable")
            }
            _ if of_layers && !self.selection.is_empty() => {
                let texts: Vec<String> = self.selection.iter().map(ToString::to_string).collect();
                (format!("--selection {}", texts.join(" --selection ")), "")
            }
            _ => return error,
        };
        let patterns = model::factorization(config)
            .map_or_else(|_| config.patterns.join(" / "), |found| found.to_string());
        anyhow!(
            "{flag} needs the dense causal pattern in every head; this model uses {patterns}; train one with --attention dense{instead}"
        )
    }

    /// What the flags say, if any.
    pub fn kept(&self) -> Result<Option<CachePolicy>> {
        let kept = self.cache.as_ref().map(|cache| cache.kept);
        let Some(CachePolicy::Evict(mut config)) = kept else {
            let given = [
                ("--budget", self.budget.is_some()),
                ("--slack", self.slack.is_some()),
            ];
            if let Some((flag, _)) = given.iter().find(|(_, is_given)| *is_given) {
                bail!("{flag} needs a --cache that evicts keys, as tova:512");
            }
            return Ok(kept);
        };
        config.budget = self.budget.unwrap_or(config.budget);
        config.slack = self.slack.unwrap_or(config.slack);
        // The numbers of --cache by themselves were checked when they were read.
        config.validate().map_err(|error| match error {
            CacheError::Argument {
                argument: "capacity",
                expected,
                got,
            } => anyhow!("--cache and --slack must keep {expected} keys, got {got}"),
            CacheError::Argument { expected, got, .. } => {
                anyhow!("--budget must be {expected}, got {got}")
            }
            error => anyhow!("--budget: {error}"),
        })?;
        Ok(Some(CachePolicy::Evict(config)))
    }
}

/// `--cache`, as it was typed and read.
#[derive(Clone, Debug)]
struct Cache {
    text: String,
    kept: CachePolicy,
}

fn kept(text: &str) -> Result<Cache, String> {
    let kept = text.parse().map_err(|error| match error {
        // What came is what clap shows; a policy may have made another number of it.
        CacheError::Argument {
            argument: "cache", ..
        } => notation::policy_expected(text),
        CacheError::Argument {
            argument, expected, ..
        } => format!("its {argument} must be {expected}"),
        error => error.to_string(),
    })?;
    let text = text.to_owned();
    Ok(Cache { text, kept })
}

fn budget(text: &str) -> Result<EvictionBudget, String> {
    let number = |text: &str| text.parse::<f64>().ok();
    let found = match text.split_once(':') {
        None if text == "uniform" => Some(EvictionBudget::Uniform),
        Some(("pyramid", beta)) => number(beta)
            .filter(|beta| *beta > 1.0 && beta.is_finite())
            .map(|beta| EvictionBudget::Pyramid { beta }),
        Some(("adaptive", alpha)) => number(alpha)
            .filter(|alpha| (0.0..=1.0).contains(alpha))
            .map(|alpha| EvictionBudget::Adaptive { alpha }),
        _ => None,
    };
    found.ok_or_else(|| {
        "must be uniform, pyramid:BETA with BETA above 1 or adaptive:ALPHA with ALPHA from 0 to 1"
            .to_owned()
    })
}
