use crate::pages::CacheError;
use burn_blocksparse::OpError;
use burn_sparse_transformer::TransformerError;

/// Errors of a [`KvPool`](crate::pool::KvPool) and of the model that decodes from it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The page allocator refused a call.
    #[error(transparent)]
    Cache(CacheError),
    /// The layers refused a call, or an argument is out of range.
    #[error(transparent)]
    Layers(#[from] TransformerError),
}

impl From<CacheError> for PoolError {
    fn from(error: CacheError) -> Self {
        match error {
            CacheError::Boundary {
                position,
                last,
                next,
            } => Self::Layers(TransformerError::Boundary {
                position,
                last,
                next,
            }),
            other => Self::Cache(other),
        }
    }
}

impl From<OpError> for PoolError {
    fn from(error: OpError) -> Self {
        Self::Layers(error.into())
    }
}

impl PoolError {
    pub(crate) fn argument(
        argument: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Self {
        Self::Layers(TransformerError::argument(argument, expected, got))
    }
}
