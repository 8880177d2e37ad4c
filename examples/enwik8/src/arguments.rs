//! Values of flags: what is outside the range that a flag allows is an error that names both.

use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::linear::WeightPattern;
use burn_sparse_transformer::{Precision, Selection};
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

/// The most that a size or a count may be, as in the layers: a product of two of them does not overflow.
pub const MOST: usize = 1 << 30;

/// The most texts or pictures that are made at once.
pub const MOST_AT_ONCE: usize = 1 << 12;

/// A size or a count that is not 0.
pub fn positive(text: &str) -> Result<usize, String> {
    number(text, 1, MOST)
}

/// A size or a count.
pub fn whole(text: &str) -> Result<usize, String> {
    number(text, 0, MOST)
}

/// How many texts or pictures to make at once.
pub fn at_once(text: &str) -> Result<usize, String> {
    number(text, 1, MOST_AT_ONCE)
}

/// A seed.
pub fn seed(text: &str) -> Result<u64, String> {
    let number = text.replace('_', "").parse();
    number.map_err(|_| format!("must be a whole number, at least 0, at most {}", u64::MAX))
}

/// A whole number in a range, whose digits may be grouped as in `12_288`.
fn number(text: &str, least: usize, most: usize) -> Result<usize, String> {
    let text = text.replace('_', "");
    let is_whole = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        Ok(number) if number > most => Err(format!("must be at most {most}")),
        // More than a word holds.
        Err(_) if is_whole => Err(format!("must be at most {most}")),
        _ => Err(format!("must be a whole number, at least {least}")),
    }
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
         share keys choose together. first=1, local=2: the first block, and two up to a byte's own, are kept whatever their scores.",
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
