/// Errors of this crate's operations.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// An argument does not fit the layout, the other arguments or its range.
    #[error("{argument} must be {expected}, got {got}")]
    Argument {
        /// The argument's name.
        argument: &'static str,
        /// The expected value.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// A layout cannot be built.
    #[error(transparent)]
    Layout(#[from] blocksparse::LayoutError),
    /// A text is not a selection in the notation of `Selection::NOTATION`.
    #[error("cannot read '{text}' as a selection: expected {expected}, got {got}")]
    Selection {
        /// The text.
        text: String,
        /// What may stand there.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// This crate does not serve the device's backend with the features that are on.
    #[error("the device's backend must be one that a feature of burn-blocksparse turns on, got {device}: {}", advice(.feature))]
    Backend {
        /// The device.
        device: String,
        /// The feature of this crate that is off. None: no feature serves this backend.
        feature: Option<&'static str>,
    },
    /// The device, or software that it needs, is missing on this machine.
    #[error("{device} must be a device that can be used on this machine, got {missing}: {install}")]
    Device {
        /// The device.
        device: String,
        /// What is missing.
        missing: String,
        /// What to do about it.
        install: &'static str,
    },
    /// What a function needs of the device could not be read.
    #[error("the device must give back its tensors, got {0}")]
    Read(String),
    /// Values of the host that a CUDA graph would capture.
    #[error(
        "{what} must be on the device before a recording begins, because replays would copy the same bytes again: \
         make the same call once before"
    )]
    Recording {
        /// What would be copied.
        what: &'static str,
    },
    /// A number of the host inside a recording, which replays would not take again.
    #[error("{what} would be the same in every replay of a recording: {instead}")]
    Frozen {
        /// The number.
        what: &'static str,
        /// What to do.
        instead: &'static str,
    },
    /// What a recording would not have updated where it lies.
    #[error(
        "{what} must be updated where it lies inside a recording, but something else holds it: replays would start from the old numbers"
    )]
    NotInPlace {
        /// What.
        what: &'static str,
    },
    /// A device that shares a sequence with this one has ended.
    #[error(
        "device {rank}, which shares the sequence, must go on until all have finished, but it has left"
    )]
    Left {
        /// Which one.
        rank: usize,
    },
    /// A process that works together with this one has failed or is gone.
    #[error("rank {rank} is lost: {reason}")]
    Lost {
        /// Which one.
        rank: usize,
        /// Why, as it said itself or as others found.
        reason: String,
    },
    /// Processes did not connect.
    #[error("the processes cannot meet at {address}: {reason}")]
    Join {
        /// Their address.
        address: String,
        /// Why not.
        reason: String,
    },
    /// What has to come before the first tensor of a program came later, or twice.
    #[cfg(all(feature = "cube", feature = "fusion"))]
    #[error(
        "accelerate_matmul and accelerate_attention must each be called once, before the first tensor: {0}"
    )]
    Registry(String),
    /// The device cannot run the call.
    #[cfg(feature = "cube")]
    #[error(transparent)]
    Kernel(#[from] blocksparse_cubecl::KernelError),
}

#[cfg(feature = "cube")]
impl From<blocksparse_cubecl::TuningError> for OpError {
    fn from(error: blocksparse_cubecl::TuningError) -> Self {
        Self::Kernel(error.into())
    }
}

fn advice(feature: &Option<&'static str>) -> String {
    match feature {
        Some(feature) => format!("turn on its feature `{feature}`, besides `burn`'s"),
        None => "none of its features does".to_string(),
    }
}

impl OpError {
    #[doc(hidden)]
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

    /// That a size is not 0.
    #[doc(hidden)]
    pub fn ensure_positive(argument: &'static str, size: usize) -> Result<(), Self> {
        match size {
            0 => Err(Self::argument(argument, "at least 1", 0)),
            _ => Ok(()),
        }
    }

    #[doc(hidden)]
    pub fn read(error: impl std::fmt::Display) -> Self {
        Self::Read(error.to_string())
    }

    /// That an argument is what another is.
    #[doc(hidden)]
    pub fn expect_same<T: PartialEq + std::fmt::Debug>(
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
