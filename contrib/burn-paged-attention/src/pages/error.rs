use super::SequenceId;
use burn_sparse_transformer::TransformerError;

/// Errors of a pool of pages. After an error the pool is as it was before the call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// An argument is out of range.
    #[error("{argument} must be {expected}, got {got}")]
    Argument {
        /// The argument's name.
        argument: &'static str,
        /// The expected value.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// The sequence does not exist, or has left.
    #[error("sequence must be one that joined this pool and has not left it, got {id}")]
    Unknown {
        /// The requested sequence.
        id: SequenceId,
    },
    /// A sequence is named twice in one call.
    #[error("sequences must be different ones, got {id} twice")]
    Twice {
        /// The sequence.
        id: SequenceId,
    },
    /// The pool has too few free pages.
    #[error("the call needs {asked} pages, {free} are free")]
    OutOfPages {
        /// Pages that the call needs.
        asked: usize,
        /// Pages that would be free for the call, including those that it frees itself.
        free: usize,
    },
    /// Tokens cannot be rolled back so far: keys that would be live again are gone.
    #[error(
        "cannot go back to {asked} tokens: keys are gone, the least is {oldest}; a pool with a longer rollback keeps more"
    )]
    Gone {
        /// Requested number of tokens.
        asked: usize,
        /// The fewest tokens that can be rolled back to.
        oldest: usize,
    },
    /// A sequence cannot end here: earlier queries see later keys.
    #[error("{}", boundary(*position, *last, *next))]
    Boundary {
        /// Position where it would end.
        position: usize,
        /// The last key that an earlier query sees; None if there is no last one.
        last: Option<usize>,
        /// The next position where it can end.
        next: Option<usize>,
    },
    /// The saved sequence is of a different pool.
    #[error("{what} of the saved sequence must be {expected}, got {got}")]
    Mismatch {
        /// The property that differs.
        what: &'static str,
        /// The pool's value.
        expected: String,
        /// The saved value.
        got: String,
    },
    /// The block tables, or those of a saved sequence, are inconsistent.
    #[error("corrupt pages: {what}")]
    Corrupt {
        /// The first contradiction found.
        what: String,
    },
}

fn boundary(position: usize, last: Option<usize>, next: Option<usize>) -> TransformerError {
    TransformerError::Boundary {
        position,
        last,
        next,
    }
}

impl CacheError {
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

    /// Checks that a property of a saved sequence equals the pool's.
    pub(crate) fn expect_same(
        what: &'static str,
        expected: impl ToString,
        got: impl ToString,
    ) -> Result<(), Self> {
        let (expected, got) = (expected.to_string(), got.to_string());
        match expected == got {
            true => Ok(()),
            false => Err(Self::Mismatch {
                what,
                expected,
                got,
            }),
        }
    }

    pub(super) fn corrupt(what: impl Into<String>) -> Self {
        Self::Corrupt { what: what.into() }
    }
}
