use super::SequenceId;
use burn_sparse_transformer::TransformerError;

/// Errors of a pool of pages. After an error the pool is as it was before the call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
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
    /// There is no such sequence, or not any more.
    #[error("sequence must be one that joined this pool and has not left it, got {id}")]
    Unknown {
        /// The sequence asked for.
        id: SequenceId,
    },
    /// A sequence is named twice in one call.
    #[error("sequences must be different ones, got {id} twice")]
    Twice {
        /// The sequence.
        id: SequenceId,
    },
    /// The pool has too few pages.
    #[error("the call needs {asked} pages, {free} are free")]
    OutOfPages {
        /// Pages that it needs.
        asked: usize,
        /// Pages that would be free for it, those that it gives back included.
        free: usize,
    },
    /// Tokens cannot be taken back so far: keys that would live again are gone.
    #[error(
        "cannot go back to {asked} tokens: keys are gone, the least is {oldest}; a pool with a longer rollback keeps more"
    )]
    Gone {
        /// Tokens asked for.
        asked: usize,
        /// The fewest tokens that can be gone back to.
        oldest: usize,
    },
    /// A sequence cannot stop where it would: queries before see keys after.
    #[error("{}", boundary(*position, *last, *next))]
    Boundary {
        /// Where it would stop.
        position: usize,
        /// The last key that a query before sees; none if there is no last one.
        last: Option<usize>,
        /// The next position to stop at.
        next: Option<usize>,
    },
    /// What was saved is of another pool.
    #[error("{what} of the saved sequence must be {expected}, got {got}")]
    Mismatch {
        /// What differs.
        what: &'static str,
        /// What the pool has.
        expected: String,
        /// What was saved.
        got: String,
    },
    /// The books contradict themselves, or what was saved does.
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

    /// That of what was saved something is as in the pool.
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
