use std::fmt;

use burn_blocksparse::{LayoutError, OpError};

use crate::Precision;

/// Result type of this crate.
pub type Result<T, E = TransformerError> = std::result::Result<T, E>;

/// Errors of configurations, inputs and caches.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransformerError {
    /// An argument or a configuration field is out of range.
    #[error("{argument} must be {expected}, got {got}")]
    Argument {
        /// Name of the argument or field.
        argument: &'static str,
        /// Expected value.
        expected: String,
        /// Actual value.
        got: String,
    },
    /// A sequence is longer than a model, a cache or a rotation table supports.
    #[error("positions must stay below {context}, {limit}, got positions {start}..{end}")]
    ContextExceeded {
        /// Number of supported positions.
        context: usize,
        /// What limits the positions.
        limit: &'static str,
        /// First requested position.
        start: usize,
        /// One past the last requested position.
        end: usize,
    },
    /// A cache would stop between positions that see each other: rows already returned would differ from those of the whole sequence.
    #[error(
        "a cache cannot stop at position {position}: queries before it attend to keys {}; {}",
        keys(*.last), stops(*.next)
    )]
    Boundary {
        /// Position where the cache would stop.
        position: usize,
        /// Last key that those queries attend to; `None` if there is always a later one.
        last: Option<usize>,
        /// Next position where the cache may stop, if the pattern has one.
        next: Option<usize>,
    },
    /// The device cannot compute in the precision of the configuration.
    #[error(
        "precision must be f32 on {device}, which does not compute in {precision}, got {precision}"
    )]
    Precision {
        /// Requested precision.
        precision: Precision,
        /// Device.
        device: String,
    },
    /// The pattern has no layout for the sequence lengths.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The attention function rejected its inputs.
    #[error(transparent)]
    Attention(#[from] OpError),
}

impl TransformerError {
    /// Returns [`Self::Argument`] with what was expected and what was given.
    pub fn argument(
        argument: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Self {
        Self::Argument {
            argument,
            expected: expected.into(),
            got: got.to_string(),
        }
    }
}

/// [`blocksparse::ensure`] with this crate's error.
macro_rules! ensure {
    ($($rows:tt)+) => {
        blocksparse::ensure! { $crate::TransformerError; $($rows)+ }
    };
}
pub(crate) use ensure;

/// Checks that an argument is absent; `expected` is the error's text.
pub fn ensure_none(argument: &'static str, given: bool, expected: &str) -> Result<()> {
    ensure! { !given => argument, expected, "some"; }
    Ok(())
}

pub(crate) fn ensure_dropout(dropout: f64) -> Result<()> {
    ensure! { (0.0..1.0).contains(&dropout) => "dropout", "at least 0 and below 1", dropout; }
    Ok(())
}

pub(crate) fn ensure_above_zero(argument: &'static str, value: f64) -> Result<()> {
    ensure! { value > 0.0 && value.is_finite() => argument, "positive and finite", value; }
    Ok(())
}

pub(crate) fn ensure_scores(scale: Option<f64>, softcap: Option<f64>) -> Result<()> {
    let scale = scale.unwrap_or(1.0);
    ensure! { (scale as f32).is_finite() => "scale", "finite, as f32", scale; }
    ensure_above_zero("softcap", softcap.unwrap_or(1.0))
}

/// Returns the value, or panics with the error's text, as burn-nn's modules do.
#[track_caller]
pub fn or_panic<T, E: fmt::Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// Defines a method that panics with the text of its fallible variant's error, and that variant with the given body.
macro_rules! or_panics {
    (
        $(#[$doc:meta])* pub fn $name:ident $(<const $dims:ident: usize>)? (&$self:ident $(, $given:ident: $kind:ty)* $(,)?) -> $made:ty;
        $(#[$tried_doc:meta])* pub fn $tried:ident $body:block
    ) => {
        $(#[$doc])*
        ///
        /// # Panics
        #[doc = concat!("With the text of [`Self::", stringify!($tried), "`]'s error.")]
        #[track_caller]
        pub fn $name $(<const $dims: usize>)? (&$self $(, $given: $kind)*) -> $made {
            $crate::error::or_panic($self.$tried($($given),*))
        }

        #[doc = concat!("[`Self::", stringify!($name), "`] that returns its error.\n")]
        $(#[$tried_doc])*
        pub fn $tried $(<const $dims: usize>)? (&$self $(, $given: $kind)*) -> $crate::error::Result<$made> $body
    };
}
pub(crate) use or_panics;

/// Upper bound of widths, lengths and counts, so that products of two do not overflow.
const MAX_SIZE: usize = 1 << 30;

/// Checks that a size is at least 1 and at most 2³⁰.
pub fn ensure_positive(argument: &'static str, value: usize) -> Result<()> {
    ensure! {
        value > 0 => argument, "at least 1", value;
        value <= MAX_SIZE => argument, format!("at most {MAX_SIZE}"), value;
    }
    Ok(())
}

pub(crate) fn ensure_multiple(
    argument: &'static str,
    value: usize,
    divisor_name: &str,
    divisor: usize,
) -> Result<()> {
    let divides = value > 0 && divisor > 0 && value.is_multiple_of(divisor);
    ensure! { divides => argument, format!("a positive multiple of {divisor_name} = {divisor}"), value; }
    ensure_positive(argument, value)
}

/// Checks a tensor's dimensions; errors print them as `[2, 16, 64]`.
pub fn ensure_shape<const D: usize>(
    argument: &'static str,
    dims: [usize; D],
    expected: [Option<usize>; D],
    names: [&'static str; D],
) -> Result<()> {
    let fits = dims
        .iter()
        .zip(&expected)
        .all(|(dim, expected)| expected.map_or(*dim > 0, |expected| *dim == expected));
    ensure! { fits => argument, describe(expected, names), format!("{dims:?}"); }
    Ok(())
}

/// Formats dimensions as `[batch = 2, seq ≥ 1, d_model = 64]`.
fn describe<const D: usize>(expected: [Option<usize>; D], names: [&'static str; D]) -> String {
    let dims: Vec<String> = names
        .iter()
        .zip(expected)
        .map(|(name, expected)| match expected {
            Some(size) => format!("{name} = {size}"),
            None => format!("{name} ≥ 1"),
        })
        .collect();
    format!("[{}]", dims.join(", "))
}

fn keys(last: Option<usize>) -> String {
    match last {
        Some(last) => format!("up to position {last}"),
        None => "without an end".into(),
    }
}

fn stops(next: Option<usize>) -> String {
    match next {
        Some(next) => format!("the next position to stop at is {next}"),
        None => "this pattern has none: it is not causal".into(),
    }
}
