/// Returns [`LayoutError::Corrupt`] with the formatted message if a condition is false.
macro_rules! ensure_sound {
    ($holds:expr, $($what:tt)+) => {
        match $holds {
            true => {}
            false => return Err(LayoutError::corrupt(format!($($what)+))),
        }
    };
}
pub(crate) use ensure_sound;

/// Errors of patterns and layouts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// An argument is outside its range.
    #[error("{argument} must be {expected}, got {got}")]
    Argument {
        /// The argument's name.
        argument: &'static str,
        /// The expected value.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// A pattern's own parameter is outside its range.
    #[error("{pattern}: {argument} must be {expected}, got {got}")]
    Pattern {
        /// The pattern's display text.
        pattern: String,
        /// The parameter's name.
        argument: &'static str,
        /// The expected value.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// Text that is not a pattern in the notation of [`Pattern::NOTATION`](crate::Pattern::NOTATION).
    #[error("cannot read '{part}' as a pattern: expected {expected}, got {got}")]
    Notation {
        /// The rejected part of the text.
        part: String,
        /// The accepted syntax at this position.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// Serialized data that does not describe a layout.
    #[error("corrupt layout: {what}")]
    Corrupt {
        /// The first inconsistency found.
        what: String,
    },
    /// A picture that cannot be drawn or written.
    #[error("cannot draw the layout to {path}: {reason}")]
    Draw {
        /// The requested file.
        path: String,
        /// The cause.
        reason: String,
    },
}

impl LayoutError {
    pub(crate) fn argument(
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

    pub(crate) fn corrupt(what: String) -> Self {
        Self::Corrupt { what }
    }
}
