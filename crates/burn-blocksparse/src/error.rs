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
    /// Text that is not a selection in the notation of `Selection::NOTATION`.
    #[error("cannot read '{text}' as a selection: expected {expected}, got {got}")]
    Selection {
        /// The text.
        text: String,
        /// The accepted syntax.
        expected: String,
        /// The actual value.
        got: String,
    },
    /// No enabled feature of this crate serves the device's backend.
    #[error("the device's backend must be one that a feature of burn-blocksparse turns on, got {device}: {}", advice(.feature))]
    Backend {
        /// The device.
        device: String,
        /// The feature of this crate that is off. `None` if no feature serves this backend.
        feature: Option<&'static str>,
    },
    /// The device, or software that it needs, is missing on this machine.
    #[error("{device} must be a device that can be used on this machine, got {missing}: {install}")]
    Device {
        /// The device.
        device: String,
        /// The missing part.
        missing: String,
        /// Instructions for the user.
        install: &'static str,
    },
    /// A tensor or result could not be read from the device.
    #[error("the device must give back its tensors, got {0}")]
    Read(String),
    /// Host values that a CUDA graph would capture.
    #[error(
        "{what} must be on the device before a recording begins, because replays would copy the same bytes again: \
         make the same call once before"
    )]
    Recording {
        /// The values that would be copied.
        what: &'static str,
    },
    /// A host number inside a recording, which replays would not update.
    #[error("{what} would be the same in every replay of a recording: {instead}")]
    Frozen {
        /// The number.
        what: &'static str,
        /// Instructions for the user.
        instead: &'static str,
    },
    /// A tensor that a recording cannot update in place.
    #[error(
        "{what} must be updated where it lies inside a recording, but something else holds it: replays would start from the old numbers"
    )]
    NotInPlace {
        /// The tensor.
        what: &'static str,
    },
    /// Another device that shares the sequence has left.
    #[error(
        "device {rank}, which shares the sequence, must go on until all have finished, but it has left"
    )]
    Left {
        /// Rank of that device.
        rank: usize,
    },
    /// A process of the group has failed or disappeared.
    #[error("rank {rank} is lost: {reason}")]
    Lost {
        /// Rank of that process.
        rank: usize,
        /// Reason, as reported by that process or by others.
        reason: String,
    },
    /// Processes could not connect.
    #[error("the processes cannot meet at {address}: {reason}")]
    Join {
        /// Address of rank 0.
        address: String,
        /// Reason.
        reason: String,
    },
    /// A registration that came after the program's first tensor, or a second time.
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

    /// Checks that a size is not 0.
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

    /// Checks that an argument equals another.
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
