//! Errors of launches.

use super::tuning::TuningError;

/// An error of a launch, detected before anything is launched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The kernels or the device do not support the dtype.
    #[error("dtype must be a float type of the device, got {dtype}")]
    Dtype {
        /// The given dtype.
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
        /// Shared memory of a cube in bytes.
        available: usize,
    },
    /// A launch exceeds a limit of the device.
    #[error("{what} must be at most {limit}, a limit of the device, got {got}")]
    Limit {
        /// The limited quantity.
        what: &'static str,
        /// Largest supported value.
        limit: u64,
        /// Value that the launch needs.
        got: u64,
    },
    /// A tensor's last dimension is not contiguous.
    #[error("{tensor}'s last dimension must have stride 1, got {stride}")]
    Stride {
        /// Name of the tensor.
        tensor: &'static str,
        /// Stride of its last dimension.
        stride: usize,
    },
    /// TMA cannot read the tensor.
    #[error(
        "{tensor} must begin at and have strides of multiples of {multiple} elements, got {got}"
    )]
    Alignment {
        /// Name of the tensor.
        tensor: &'static str,
        /// Required multiple, in elements.
        multiple: usize,
        /// The offending stride or offset.
        got: usize,
    },
    /// Residue classes differ in length, which TMA cannot read.
    #[error("{tensor}'s sequence must be a multiple of the pattern's stride {stride}, got {seq}")]
    Classes {
        /// Name of the tensor.
        tensor: &'static str,
        /// The pattern's stride.
        stride: usize,
        /// Length of the tensor's sequence.
        seq: usize,
    },
    /// The kernel does not support the scale.
    #[error("scale must be positive, got {scale}")]
    Scale {
        /// The given scale.
        scale: String,
    },
    /// A factor differs from what the product was planned for.
    #[error("{factor} must have the lengths and strides that the product was planned for")]
    Factor {
        /// Name of the factor.
        factor: &'static str,
    },
    /// An output that the request asks for has no buffer.
    #[error("{output} must have a buffer, because the request asks for it, got none")]
    Output {
        /// Name of the output.
        output: &'static str,
    },
    /// Host data would be uploaded inside a recording.
    #[error(
        "{what} must be on the device before a recording begins, because replays would copy the same bytes again: \
         make the same call once before"
    )]
    Recording {
        /// The data that would be uploaded.
        what: &'static str,
    },
    /// An environment variable has an invalid value.
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

    /// Checks that `got` is at most `limit`.
    pub fn check(what: &'static str, limit: impl Into<u64>, got: usize) -> Result<(), Self> {
        let limit = limit.into();
        match got as u64 <= limit {
            true => Ok(()),
            false => Err(Self::limit(what, limit, got)),
        }
    }

    /// Checks that `got` fits 32 bits.
    pub fn check_u32(what: &'static str, got: usize) -> Result<u32, Self> {
        u32::try_from(got).map_err(|_| Self::limit(what, u32::MAX, got))
    }
}
