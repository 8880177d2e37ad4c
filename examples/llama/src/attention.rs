//! What `--attention` takes.

use std::fmt;
use std::str::FromStr;

use anyhow::{Error, Result, bail};
use burn_sparse_transformer::llama::Llama;
use burn_sparse_transformer::{Pattern, Selection};

/// Which keys each query attends to.
#[derive(Clone, Debug)]
pub enum Attention {
    /// As the model was trained.
    Dense,
    /// A pattern in place of the causal one.
    Pattern(Pattern),
    /// Keys chosen by content.
    Selection(Selection),
}

impl FromStr for Attention {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "dense" {
            return Ok(Self::Dense);
        }
        match (text.parse::<Pattern>(), text.parse::<Selection>()) {
            (Ok(pattern), _) => Ok(Self::Pattern(pattern)),
            (_, Ok(selection)) => Ok(Self::Selection(selection)),
            (Err(pattern), Err(selection)) => {
                bail!("is neither dense, nor a pattern ({pattern}), nor a selection ({selection})")
            }
        }
    }
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Dense => f.write_str("dense"),
            Self::Pattern(pattern) => pattern.fmt(f),
            Self::Selection(selection) => selection.fmt(f),
        }
    }
}

impl Attention {
    /// The same weights with this attention.
    ///
    /// # Errors
    /// If it does not fit the model.
    pub fn of(&self, model: &Llama, block_size: usize) -> Result<Llama> {
        let model = model.clone();
        Ok(match self {
            Self::Dense => model,
            Self::Pattern(pattern) => model.with_pattern(pattern.clone(), block_size)?,
            Self::Selection(selection) => model.with_selections(std::slice::from_ref(selection))?,
        })
    }

    /// Whether later tokens change what earlier ones attend to, so that prompts alone are read by it.
    pub fn reads_prompts_alone(&self) -> bool {
        match self {
            Self::Dense | Self::Pattern(_) => false,
            Self::Selection(selection) => {
                let estimator = selection.estimator();
                !(estimator.traits().prefix_stable && estimator.page_summary().is_some())
            }
        }
    }
}
