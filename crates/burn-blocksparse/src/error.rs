/// What can be wrong with a call of [`attention`](crate::attention()).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// An argument does not fit the layout, the other arguments or its range.
    #[error("{argument} must be {expected}, got {got}")]
    Argument {
        /// The argument's name.
        argument: &'static str,
        /// What it has to be.
        expected: String,
        /// What came.
        got: String,
    },
    /// A layout that was asked for cannot be.
    #[error(transparent)]
    Layout(#[from] blocksparse::LayoutError),
    /// What a function needs of the device could not be read.
    #[error("the device must give back its tensors, got {0}")]
    Read(String),
    /// The device cannot run the call.
    #[cfg(feature = "cube")]
    #[error(transparent)]
    Kernel(#[from] blocksparse::kernels::KernelError),
}

impl AttentionError {
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

    pub(crate) fn read(error: impl std::fmt::Display) -> Self {
        Self::Read(error.to_string())
    }

    /// That an argument is what another is.
    pub(crate) fn expect_same<T: PartialEq + std::fmt::Debug>(
        argument: &'static str,
        expected: T,
        whose: &str,
        got: T,
    ) -> Result<(), Self> {
        match expected == got {
            true => Ok(()),
            false => Err(Self::argument(
                argument,
                format!("{expected:?}, {whose}"),
                format!("{got:?}"),
            )),
        }
    }
}
