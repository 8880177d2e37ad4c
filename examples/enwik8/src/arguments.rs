//! Values of flags: what is outside the range that a flag allows is an error that names both.

use std::str::FromStr;

use burn_sparse_transformer::{ContentAttention, Precision, Selection, WeightPattern};
use clap::Command;
use clap::builder::{PossibleValuesParser, TypedValueParser};

/// Reads `-1` as the value of the flag before it, for every flag of every command: otherwise clap takes it for a flag
/// of its own, and the error names neither the argument nor its range.
pub fn with_negative_numbers(command: Command) -> Command {
    command.mut_subcommands(|command| {
        command.mut_args(|argument| match argument.get_action().takes_values() {
            true => argument.allow_negative_numbers(true),
            false => argument,
        })
    })
}

/// A whole number that is not 0.
pub fn positive(text: &str) -> Result<usize, String> {
    match digits(text) {
        Some(number) if number > 0 => Ok(number),
        _ => Err("must be a whole number, at least 1".to_owned()),
    }
}

/// A whole number.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    digits(text).ok_or_else(|| "must be a whole number, at least 0".to_owned())
}

/// A number above 0.
pub fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && f64::is_finite(number) => Ok(number),
        _ => Err("must be a number above 0".to_owned()),
    }
}

/// A number that is not negative.
pub fn at_least_zero(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number >= 0.0 && f64::is_finite(number) => Ok(number),
        _ => Err("must be a number, at least 0".to_owned()),
    }
}

/// A probability or a decay.
pub fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..1.0).contains(&number) => Ok(number),
        _ => Err("must be a number from 0 up to, not including, 1".to_owned()),
    }
}

/// A part of everything.
pub fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && number <= 1.0 => Ok(number),
        _ => Err("must be a number above 0, at most 1".to_owned()),
    }
}

/// A part of something, or nothing of it.
pub fn ratio(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("must be a number from 0 to 1".to_owned()),
    }
}

/// A text of at least one character.
pub fn text(text: &str) -> Result<String, String> {
    match text.is_empty() {
        true => Err("must not be empty".to_owned()),
        false => Ok(text.to_owned()),
    }
}

/// `--precision`.
pub fn precision(text: &str) -> Result<Precision, String> {
    Precision::ALL
        .into_iter()
        .find(|precision| precision.name() == text)
        .ok_or_else(|| "must be f32, tf32 or bf16".to_owned())
}

/// `--ff-layout`: the name of a layout of weights.
pub fn weight_pattern() -> impl TypedValueParser<Value = WeightPattern> {
    let names = PossibleValuesParser::new(WeightPattern::all().map(WeightPattern::name));
    names.try_map(|name| name.parse::<WeightPattern>())
}

/// `--selection` with all that can stand there.
pub fn selection_help(usage: &str) -> String {
    format!(
        "{usage}\n\nTexts:\n  {}\n\nKEEP is a number or a rule: k=12, ratio=0.25, p=0.9 (with min=, max=) or above=0.01. share=sum, mean or max: heads that\n\
         share keys choose together.",
        Selection::NOTATION.join("\n  ")
    )
}

/// `--attention` with all that can stand there.
pub fn attention_help(usage: &str) -> String {
    format!(
        "{usage}\n\nTexts:\n  sparse  the preset's pattern, or --pattern\n  dense   every earlier byte\n  {}",
        ContentAttention::NOTATION.join("\n  ")
    )
}

/// Digits, which may be grouped as in `12_288`.
fn digits<T: FromStr>(text: &str) -> Option<T> {
    text.replace('_', "").parse().ok()
}
