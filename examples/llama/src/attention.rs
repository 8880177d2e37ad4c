//! What `--attention` takes.

use std::fmt;
use std::str::FromStr;

use anyhow::{Error, Result, bail};
use burn_sparse_transformer::llama::Llama;
use burn_sparse_transformer::{Pattern, Selection};

/// Which keys each query attends to, and how that was typed.
#[derive(Clone, Debug)]
pub struct Attention {
    text: String,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub enum Kind {
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
        let kind = match (text.parse::<Pattern>(), text.parse::<Selection>()) {
            _ if text == "dense" => Kind::Dense,
            (Ok(pattern), _) => Kind::Pattern(pattern),
            (_, Ok(selection)) => Kind::Selection(selection),
            (Err(pattern), Err(selection)) => {
                bail!("is neither dense, nor a pattern ({pattern}), nor a selection ({selection})")
            }
        };
        let text = text.to_owned();
        Ok(Self { text, kind })
    }
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Attention {
    /// The same weights with this attention.
    pub fn of(&self, model: &Llama, block_size: usize) -> Result<Llama> {
        let model = model.clone();
        Ok(match &self.kind {
            Kind::Dense => model,
            Kind::Pattern(pattern) => model.with_pattern(pattern.clone(), block_size)?,
            Kind::Selection(selection) => model.with_selections(std::slice::from_ref(selection))?,
        })
    }

    /// Whether later tokens change what earlier ones attend to, so that prompts alone are read by it.
    pub fn reads_prompts_alone(&self) -> bool {
        match &self.kind {
            Kind::Dense | Kind::Pattern(_) => false,
            Kind::Selection(selection) => {
                let estimator = selection.estimator();
                !(estimator.traits().prefix_stable && estimator.page_summary().is_some())
            }
        }
    }
}
