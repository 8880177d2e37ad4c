//! Translation of the library's names to flags in error messages.

use std::error::Error;

use burn_sparse_transformer::TransformerError;
use clap::Command;

/// Rules: a condition that must hold, and the message if it does not.
macro_rules! ensure_all {
    ($($holds:expr => $text:literal $(, $number:expr)*;)+) => {
        $(anyhow::ensure!($holds, $text $(, $number)*);)+
    };
}
pub(crate) use ensure_all;

/// Fields and arguments whose flags have other names, or that further flags change (those come last). Every other flag is the name with `-` in place of `_`.
const FLAGS: [(&str, &[&str]); 31] = [
    ("n_layers", &["layers"]),
    ("n_heads", &["heads"]),
    ("n_kv_heads", &["kv-heads"]),
    ("block_size", &["block"]),
    ("embedding_width", &["position-width"]),
    (
        "position_width",
        &["position-width", "pattern", "picture-size"],
    ),
    ("context", &["context", "picture-size"]),
    (
        "patterns",
        &[
            "pattern",
            "attention",
            "selection",
            "selection-file",
            "picture-size",
        ],
    ),
    (
        "factorization",
        &["factorization", "attention", "selection", "selection-file"],
    ),
    ("content", &["attention", "commitment", "means-decay"]),
    ("local_heads", &["local-heads", "attention"]),
    ("selections", &["selection", "selection-file"]),
    ("head_selections", &["selection-file", "selection"]),
    ("full_last_layers", &["selection-full-last"]),
    ("pictures", &["picture-size"]),
    ("pictures.side", &["picture-size"]),
    ("pictures.classes", &["classes"]),
    ("pictures.halved", &["halve"]),
    ("ff_weights", &["ff-density"]),
    ("ff_weights.density", &["ff-density"]),
    ("ff_weights.block", &["ff-block", "ff-density"]),
    ("ff_weights.layout", &["ff-layout", "ff-density"]),
    ("ff_prune.density", &["ff-prune"]),
    ("ff_prune.from", &["ff-prune-from"]),
    ("ff_prune.until", &["ff-prune-until"]),
    ("ff_prune.every", &["ff-prune-every"]),
    ("learning_rate", &["lr"]),
    ("beta_1", &["beta1"]),
    ("beta_2", &["beta2"]),
    ("max_grad_norm", &["clip"]),
    ("indexer_rate", &["indexer-lr"]),
];

/// Returns the flags that change a field, its own first; empty if the only flag has the field's name.
pub fn all_of(name: &str) -> &'static [&'static str] {
    let known = FLAGS.iter().find(|(known, _)| *known == name);
    known.map_or(&[], |(_, flags)| *flags)
}

/// Returns the flag of a field or an argument, without dashes.
pub fn of(name: &str) -> String {
    let own = all_of(name).first();
    own.map_or_else(|| name.replace('_', "-"), |flag| (*flag).to_owned())
}

/// Returns which of a flag's two names is on the command line, or else the first.
pub fn typed(names: [&'static str; 2]) -> &'static str {
    let is_typed = |name: &&str| {
        std::env::args().any(|word| {
            let flag = word.strip_prefix("--");
            flag.and_then(|flag| flag.split('=').next()) == Some(*name)
        })
    };
    names.into_iter().find(is_typed).unwrap_or(names[0])
}

/// Formats an error with its causes; arguments that are flags of the command are shown as flags.
pub fn text(error: &anyhow::Error, command: Option<&Command>) -> String {
    let causes: Vec<String> = error
        .chain()
        .map(|cause| {
            let named = command.and_then(|command| by_flag(cause, command));
            named.unwrap_or_else(|| cause.to_string())
        })
        .collect();
    causes.join(": ")
}

fn by_flag(cause: &(dyn Error + 'static), command: &Command) -> Option<String> {
    let flag = |name: &str| {
        let flag = of(name);
        let mut arguments = command.get_arguments();
        arguments
            .any(|argument| argument.get_long() == Some(flag.as_str()))
            .then_some(flag)
    };
    if let Some(TransformerError::Precision { .. }) = cause.downcast_ref::<TransformerError>() {
        return Some(format!("--{cause}")).filter(|_| flag("precision").is_some());
    }
    let text = cause.to_string();
    let (argument, expected, got) = parts(&text)?;
    let argument = flag(argument)?;
    // As in "a positive multiple of n_heads = 8".
    let words: Vec<&str> = expected.split(' ').collect();
    let words: Vec<String> = words
        .iter()
        .enumerate()
        .map(|(at, word)| match words.get(at + 1) {
            Some(&"=") => flag(word).map_or((*word).to_owned(), |flag| format!("--{flag}")),
            _ => (*word).to_owned(),
        })
        .collect();
    Some(format!(
        "--{argument} must be {}, got {got}",
        words.join(" ")
    ))
}

/// Splits an error about an argument into the argument, what is expected, and what was given: all such errors of the libraries have one format.
fn parts(text: &str) -> Option<(&str, &str, &str)> {
    let (argument, rest) = text.split_once(" must be ")?;
    let (expected, got) = rest.rsplit_once(", got ")?;
    Some((argument, expected, got))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use anyhow::Context;
    use burn_blocksparse::Pattern;
    use burn_sparse_transformer::{Factorization, SparseTransformerConfig};
    use clap::{Args, CommandFactory};

    use super::*;
    use crate::Cli;
    use crate::config::{self, RunConfig};
    use crate::overrides::Overrides;
    use crate::presets::Preset;

    fn train() -> Command {
        let cli = Cli::command();
        cli.find_subcommand("train").unwrap().clone()
    }

    #[test]
    #[cfg(feature = "flex")]
    fn errors_of_the_library_name_flags() {
        let config = |d_model, heads, width| {
            SparseTransformerConfig::new(d_model, heads, Factorization::from(Pattern::local(8)))
                .with_vocab_size(256)
                .with_context(64)
                .with_n_layers(1)
                .with_embedding_width(Some(width))
        };
        let device = burn::tensor::Device::flex();
        for (config, message) in [
            (
                config(30, 4, 8),
                "--d-model must be a positive multiple of --heads = 4, got 30",
            ),
            (
                config(32, 4, 0),
                "--position-width must be between 1 and 64, the context, got 0",
            ),
        ] {
            let error = config.try_init(&device).err().unwrap();
            let error = anyhow::Error::from(error);
            assert_eq!(text(&error, Some(&train())), message);
            let more = Err::<(), _>(error).context("runs/x").unwrap_err();
            assert_eq!(text(&more, Some(&train())), format!("runs/x: {message}"));
        }
        let layout: anyhow::Error = Pattern::local(8).layout(2, 64, 12).unwrap_err().into();
        let message = text(&layout, Some(&train()));
        assert!(message.starts_with("--block must be "), "{message}");
        // A name that is no flag of the command is unchanged.
        let message = text(&layout, Some(&Command::new("another")));
        assert!(message.starts_with("block_size must be "), "{message}");
    }

    /// Every field of a configuration that a user can change has a flag of `train`, and only fields and arguments are renamed.
    #[test]
    fn every_field_has_a_flag() {
        let full = Overrides::read(
            "--ff-density 0.5 --ff-prune 0.25 --ff-prune-until 1000 --indexer-lr 0.1 \
             --attention dsa:32,4,2,8 --indexer-warmup 5",
        );
        let mut names = BTreeSet::new();
        for (preset, overrides) in [
            (Preset::Tiny, &full),
            (Preset::Shapes, &Overrides::read("")),
        ] {
            let config = RunConfig::new(preset, overrides).unwrap();
            names.extend(config::fields(&config).into_keys());
        }
        // --steps and --epochs.
        assert!(names.remove("length"));
        let command = train();
        for name in &names {
            let flag = of(name);
            let mut arguments = command.get_arguments();
            assert!(
                arguments.any(|argument| argument.get_long() == Some(flag.as_str())),
                "{name}: --{flag}"
            );
        }
        let flags = Overrides::augment_args(Command::new("flags"));
        for (name, known) in FLAGS {
            for &flag in known {
                let mut arguments = flags.get_arguments();
                assert!(
                    arguments.any(|argument| argument.get_long() == Some(flag)),
                    "{name}: --{flag}"
                );
            }
        }
    }
}
