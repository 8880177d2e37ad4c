//! Rows of a table, also as lines of JSON.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn_paged_attention::pool::KvPoolConfig;
use clap::Args;
use serde_json::{Value, json};

use crate::attention::Attention;
use crate::cache::Cache;

/// Setting of a row: an attention, and a cache if it is read through one.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    pub attention: &'a Attention,
    pub cache: Option<&'a Cache>,
}

impl Setting<'_> {
    /// Returns the label of a row.
    pub fn label(&self) -> String {
        match self.cache {
            Some(cache) => format!("{}, {cache}", self.attention),
            None => self.attention.to_string(),
        }
    }

    /// Configures the pool of this setting, for calls of at most `longest` tokens.
    pub fn pool(&self, config: KvPoolConfig, longest: usize) -> KvPoolConfig {
        let config = match self.cache {
            Some(cache) => cache.of(config, longest),
            None => config,
        };
        match self.attention.reads_prompts_alone() {
            true => config.with_choosing_prompts(),
            false => config,
        }
    }
}

/// Returns every attention with every cache.
pub fn settings<'a>(attentions: &'a [Attention], caches: &'a [Cache]) -> Vec<Setting<'a>> {
    let of = |attention| {
        let cached = caches.iter().map(move |cache| Setting {
            attention,
            cache: Some(cache),
        });
        let whole = Setting {
            attention,
            cache: None,
        };
        cached.chain(caches.is_empty().then_some(whole))
    };
    attentions.iter().flat_map(of).collect()
}

/// Where rows are written to, besides the table.
#[derive(Args, Debug)]
pub struct JsonArgs {
    /// Also write each row as a line of JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// JSON file for rows, if there is one.
pub struct Lines(Option<(PathBuf, File)>);

impl JsonArgs {
    pub fn lines(&self) -> Result<Lines> {
        let Some(path) = &self.json else {
            return Ok(Lines(None));
        };
        let file = File::create(path).with_context(|| named(path))?;
        Ok(Lines(Some((path.clone(), file))))
    }
}

impl Lines {
    pub fn push(&mut self, setting: Setting, mut measured: Value) -> Result<()> {
        let Some((path, file)) = &mut self.0 else {
            return Ok(());
        };
        measured["attention"] = json!(setting.attention.to_string());
        measured["cache"] = json!(setting.cache.map(ToString::to_string));
        writeln!(file, "{measured}").with_context(|| named(path))
    }
}

fn named(path: &Path) -> String {
    format!("--json {}", path.display())
}
