use std::fmt;

use burn_blocksparse::{LayoutError, OpError};

use crate::Precision;

/// What most functions of this crate return.
pub type Result<T, E = TransformerError> = std::result::Result<T, E>;

/// Errors of configurations, inputs and caches.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransformerError {
    /// An argument or a configuration's field is outside its range.
    #[error("{argument} must be {expected}, got {got}")]
    Argument {
        /// The argument's or the field's name.
        argument: &'static str,
        /// The expected value.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// A sequence is longer than a model, a cache or a table of rotations takes.
    #[error("positions must stay below {context}, {limit}, got positions {start}..{end}")]
    ContextExceeded {
        /// Number of positions that there may be.
        context: usize,
        /// What says so.
        limit: &'static str,
        /// First position asked for.
        start: usize,
        /// One past the last position asked for.
        end: usize,
    },
    /// A cache would stop between positions that see each other: rows that were given out would not be those of the whole sequence.
    #[error(
        "a cache cannot stop at position {position}: queries before it attend to keys {}; {}",
        keys(*.last), stops(*.next)
    )]
    Boundary {
        /// Where it would stop.
        position: usize,
        /// The last key that those queries attend to; none: there is always a later one.
        last: Option<usize>,
        /// The next position to stop at, if the pattern has one.
        next: Option<usize>,
    },
    /// The device cannot compute in the precision of the configuration.
    #[error(
        "precision must be f32 on {device}, which does not compute in {precision}, got {precision}"
    )]
    Precision {
        /// What was asked for.
        precision: Precision,
        /// The device.
        device: String,
    },
    /// The pattern does not give a layout for the sequence lengths at hand.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The attention function refused its inputs.
    #[error(transparent)]
    Attention(#[from] OpError),
}

impl TransformerError {
    /// [`Self::Argument`]: what must be `expected`, and what came.
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

/// Rows of what arguments must be, of this crate's error: see [`blocksparse::ensure`].
macro_rules! ensure {
    ($($rows:tt)+) => {
        blocksparse::ensure! { $crate::TransformerError; $($rows)+ }
    };
}
pub(crate) use ensure;

/// Checks that an argument is absent: `expected` says so.
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

/// Returns what `try_…` gives, or panics with its error's text: the modules of burn-nn also panic.
#[track_caller]
pub fn or_panic<T, E: fmt::Display>(result: Result<T, E>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// A method that panics with the text of its twin's error, and the twin with what is done.
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

/// Widths, lengths and counts stay below this, so that what is computed from two of them does not overflow.
const MAX_SIZE: usize = 1 << 30;

/// A size that must be at least 1.
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

/// A tensor's dimensions, printed as `[2, 16, 64]`.
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

/// `[batch = 2, seq ≥ 1, d_model = 64]`.
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
