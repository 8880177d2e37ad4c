//! What can be wrong with a launch.

use super::tuning::TuningError;

/// What can be wrong with a launch. All of it is known before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A dtype the kernels or the device do not have.
    #[error("dtype must be a float type of the device, got {dtype}")]
    Dtype {
        /// The dtype that came.
        dtype: String,
    },
    /// No tile fits the shared memory of the device.
    #[error(
        "head_dim and value_dim must fit tiles in {available} bytes of shared memory, \
         got {head_dim} and {value_dim}"
    )]
    SharedMemory {
        /// Width of queries and keys.
        head_dim: usize,
        /// Width of values.
        value_dim: usize,
        /// Bytes a cube has.
        available: usize,
    },
    /// More of something than a launch on the device can have.
    #[error("{what} must be at most {limit}, a limit of the device, got {got}")]
    Limit {
        /// What there is too much of.
        what: &'static str,
        /// The most there can be.
        limit: u64,
        /// What a launch would need.
        got: u64,
    },
    /// A tensor whose last dimension is not contiguous.
    #[error("{tensor}'s last dimension must have stride 1, got {stride}")]
    Stride {
        /// The tensor.
        tensor: &'static str,
        /// Its last stride.
        stride: usize,
    },
    /// A tensor that TMA cannot read.
    #[error(
        "{tensor} must begin at and have strides of multiples of {multiple} elements, got {got}"
    )]
    Alignment {
        /// The tensor.
        tensor: &'static str,
        /// The multiple.
        multiple: usize,
        /// A stride, or where it begins.
        got: usize,
    },
    /// Residue classes of different lengths, which TMA cannot read.
    #[error("{tensor}'s sequence must be a multiple of the pattern's stride {stride}, got {seq}")]
    Classes {
        /// The tensor.
        tensor: &'static str,
        /// The pattern's stride.
        stride: usize,
        /// Its sequence.
        seq: usize,
    },
    /// A scale that a kernel does not take.
    #[error("scale must be positive, got {scale}")]
    Scale {
        /// The scale.
        scale: String,
    },
    /// A factor of a product that is not what was planned.
    #[error("{factor} must have the lengths and strides that the product was planned for")]
    Factor {
        /// The factor.
        factor: &'static str,
    },
    /// An output that a request asks for and that has no buffer.
    #[error("{output} must have a buffer, because the request asks for it, got none")]
    Output {
        /// The output.
        output: &'static str,
    },
    /// Numbers of the host that would be uploaded inside a recording.
    #[error(
        "{what} must be on the device before a recording begins, because replays would copy the same bytes again: \
         make the same call once before"
    )]
    Recording {
        /// What would be uploaded.
        what: &'static str,
    },
    /// An environment variable that says what it may not.
    #[error(transparent)]
    Tuning(#[from] TuningError),
}

impl KernelError {
    pub fn limit(what: &'static str, limit: impl Into<u64>, got: usize) -> Self {
        Self::Limit {
            what,
            limit: limit.into(),
            got: got as u64,
        }
    }

    /// Checks that there are no more of something.
    pub fn check(what: &'static str, limit: impl Into<u64>, got: usize) -> Result<(), Self> {
        let limit = limit.into();
        match got as u64 <= limit {
            true => Ok(()),
            false => Err(Self::limit(what, limit, got)),
        }
    }

    /// Checks that there are no more of something than 32 bits count.
    pub fn check_u32(what: &'static str, got: usize) -> Result<u32, Self> {
        u32::try_from(got).map_err(|_| Self::limit(what, u32::MAX, got))
    }
}
