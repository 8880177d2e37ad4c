//! Values of `--attention`.

use std::fmt;
use std::str::FromStr;

use anyhow::{Error, Result, bail};
use burn_sparse_transformer::llama::Llama;
use burn_sparse_transformer::{Pattern, Selection};

/// Attention of a model, with its text as typed.
#[derive(Clone, Debug)]
pub struct Attention {
    text: String,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub enum Kind {
    /// As the model was trained.
    Dense,
    /// A pattern instead of the causal one.
    Pattern(Pattern),
    /// A selection of keys by content.
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
                let is_one_of = |forms: &[&str]| forms.iter().any(|form| name(form) == name(text));
                match [Pattern::NOTATION, Selection::NOTATION].map(is_one_of) {
                    [true, _] => bail!("{pattern}"),
                    [_, true] => bail!("{selection}"),
                    _ => bail!("there is none of that name: {}", names()),
                }
            }
        };
        let text = text.to_owned();
        Ok(Self { text, kind })
    }
}

/// Returns `fixed` for `fixed:STRIDE,COLUMNS[,VERTS]`.
fn name(form: &str) -> &str {
    form.split_once(':').map_or(form, |(name, _)| name)
}

fn names() -> String {
    let of = |forms: &[&'static str]| forms.iter().map(|form| name(form)).collect::<Vec<_>>();
    let [patterns, selections] = [Pattern::NOTATION, Selection::NOTATION].map(of);
    format!(
        "patterns are {}; selections are {}",
        patterns.join(", "),
        selections.join(", ")
    )
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Attention {
    /// Returns the same weights with this attention.
    pub fn of(&self, model: &Llama, block_size: usize) -> Result<Llama> {
        let model = model.clone();
        Ok(match &self.kind {
            Kind::Dense => model,
            Kind::Pattern(pattern) => model.with_pattern(pattern.clone(), block_size)?,
            Kind::Selection(selection) => model.with_selections(std::slice::from_ref(selection))?,
        })
    }

    /// Returns whether later tokens change what earlier ones attend to, so that only prompts can be read with it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_of_what_was_meant() {
        for (text, words) in [
            ("strem:4", "patterns are dense, causal, local, "),
            ("strem:4", "; selections are topk, moba, "),
            ("local:x", "expected local:WINDOW"),
            ("topk:16", "expected topk:BLOCK,KEEP"),
        ] {
            let error = text.parse::<Attention>().unwrap_err().to_string();
            assert!(error.contains(words) && error.len() < 400, "{error}");
        }
    }
}
