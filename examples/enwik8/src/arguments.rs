//! Parsers of flags' values. A value out of range is an error that names the flag and the range.

use std::path::PathBuf;

use anyhow::Result;
use burn_sparse_transformer::linear::WeightPattern;
use burn_sparse_transformer::{Precision, Recompute, TransformerError};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Command};

use crate::checkpoint::Checkpoint;
use crate::device::{self, NamedDevice};
use crate::{flags, run};

/// The model that a command reads, and where it computes.
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// A checkpoint file, or a run folder, whose best checkpoint is taken
    #[arg(
        long,
        value_name = "PATH",
        default_value = "runs/tiny",
        visible_alias = "run"
    )]
    checkpoint: PathBuf,
    /// f32, tf32, bf16 or fp8 [default: the run's]
    #[arg(long, value_parser = precision, value_name = "DTYPE")]
    precision: Option<Precision>,
    /// Skip tiles of queries and keys whose scores are all below the largest ones by more than T [default: the run's]
    #[arg(long, value_parser = above_zero, value_name = "T")]
    softmax_threshold: Option<f64>,
    /// flex, ndarray, wgpu, cuda or cuda:INDEX [default: the best that is compiled in]
    #[arg(long)]
    device: Option<String>,
}

impl ModelArgs {
    /// Opens the device and the checkpoint, and returns the checkpoint's path too.
    pub fn open(&self) -> Result<(NamedDevice, PathBuf, Checkpoint)> {
        let device = device::open(self.device.as_deref())?;
        let flag = flags::typed(["checkpoint", "run"]);
        let (path, mut checkpoint) = run::open_checkpoint(flag, &self.checkpoint)?;
        if let Some(precision) = self.precision {
            checkpoint.header.config.model.precision = precision;
        }
        let threshold = &mut checkpoint.header.config.model.softmax_threshold;
        *threshold = self.softmax_threshold.or(*threshold);
        Ok((device, path, checkpoint))
    }
}

/// Headings of flags that `-h` omits and `--help` shows.
const RARE: [&str; 4] = [CONTENT, IMAGES, SPARSE_MLP, LOG];
/// Flags of content-based attention.
pub const CONTENT: &str = "Attention by content";
/// Flags of images.
pub const IMAGES: &str = "Images";
/// Flags of the feed-forward networks.
pub const SPARSE_MLP: &str = "Block-sparse feed-forward networks";
/// Flags of validation, checkpoints and the log.
pub const LOG: &str = "Validation, checkpoints and log (defaults from the preset)";

/// Applies the settings that all commands share.
pub fn finished(command: Command) -> Command {
    command.max_term_width(100).mut_subcommands(|command| {
        command.mut_args(|argument| {
            let heading = argument.get_help_heading();
            let is_rare = heading.is_some_and(|heading| RARE.contains(&heading));
            let takes_values = argument.get_action().takes_values();
            let argument = argument.hide_short_help(is_rare);
            match takes_values {
                // Otherwise -1 is parsed as a flag, and the error names neither the argument nor its range.
                true => argument.allow_negative_numbers(true),
                false => argument,
            }
        })
    })
}

/// Upper bound of sizes and counts, as in the layers: a product of two does not overflow.
pub const MOST: usize = 1 << 30;

/// Most texts or images that are generated at once.
pub const MOST_AT_ONCE: usize = 1 << 12;

/// Parses a size or a count that is not 0.
pub fn positive(text: &str) -> Result<usize, String> {
    number(text, 1, MOST)
}

pub fn whole(text: &str) -> Result<usize, String> {
    number(text, 0, MOST)
}

/// Parses the number of texts or images to generate at once.
pub fn at_once(text: &str) -> Result<usize, String> {
    number(text, 1, MOST_AT_ONCE)
}

pub fn seed(text: &str) -> Result<u64, String> {
    let number = text.replace('_', "").parse();
    number.map_err(|_| format!("must be a whole number, at least 0, at most {}", u64::MAX))
}

/// Parses an integer in a range; digits may be grouped as in `12_288`.
fn number(text: &str, least: usize, most: usize) -> Result<usize, String> {
    let text = text.replace('_', "");
    let is_whole = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        Ok(number) if number > most => Err(format!("must be at most {most}")),
        // The number exceeds a word.
        Err(_) if is_whole => Err(format!("must be at most {most}")),
        _ => Err(format!("must be a whole number, at least {least}")),
    }
}

pub fn above_zero(text: &str) -> Result<f64, String> {
    float(text, " above 0", |number| number > 0.0)
}

pub fn at_least_zero(text: &str) -> Result<f64, String> {
    float(text, ", at least 0", |number| number >= 0.0)
}

/// Parses a probability or a decay.
pub fn fraction(text: &str) -> Result<f64, String> {
    let expected = " from 0 up to, not including, 1";
    float(text, expected, |number| (0.0..1.0).contains(&number))
}

/// Parses a share above 0.
pub fn share(text: &str) -> Result<f64, String> {
    float(text, " above 0, at most 1", |number| {
        number > 0.0 && number <= 1.0
    })
}

/// Parses a share that may be 0.
pub fn ratio(text: &str) -> Result<f64, String> {
    float(text, " from 0 to 1", |number| (0.0..=1.0).contains(&number))
}

/// Parses a finite number that `allows` accepts.
fn float(text: &str, expected: &str, allows: fn(f64) -> bool) -> Result<f64, String> {
    let number = text.parse().ok();
    let number = number.filter(|&number: &f64| number.is_finite() && allows(number));
    number.ok_or_else(|| format!("must be a number{expected}"))
}

/// Parses a text of at least one character.
pub fn text(text: &str) -> Result<String, String> {
    match text.is_empty() {
        true => Err("must not be empty".to_owned()),
        false => Ok(text.to_owned()),
    }
}

pub fn precision(text: &str) -> Result<Precision, String> {
    Precision::ALL
        .into_iter()
        .find(|precision| precision.name() == text)
        .ok_or_else(|| "must be f32, tf32, bf16 or fp8".to_owned())
}

/// Parses `--ff-layout`: the name of a layout of weights.
pub fn weight_pattern() -> impl TypedValueParser<Value = WeightPattern> {
    let names = PossibleValuesParser::new(WeightPattern::all().map(WeightPattern::name));
    names.try_map(|name| name.parse::<WeightPattern>())
}

pub fn recompute(text: &str) -> Result<Recompute, String> {
    text.parse().map_err(|error| match error {
        TransformerError::Argument { expected, .. } => format!("must be {expected}"),
        error => error.to_string(),
    })
}
