//! What is wrong with several devices.

use thiserror::Error;

/// Why a run cannot begin on several devices, or ended there.
#[derive(Debug, Error, PartialEq)]
pub enum DevicesError {
    /// No device, or one without a name.
    #[error("--devices must name one device at least, as in 0,1 or cuda:0,cuda:1, got '{0}'")]
    Empty(String),
    /// Devices of several backends.
    #[error("--devices must be of one kind, got {first} and {other}")]
    Kinds {
        first: String,
        /// The first one of another kind.
        other: String,
    },
    /// Windows that cannot be shared out equally.
    #[error("--batch must be a multiple of the {devices} devices of --devices, got {batch}")]
    Batch {
        devices: usize,
        /// Windows of a step.
        batch: usize,
    },
    /// Dropout of rows, whose masks follow their place in a batch.
    #[error("--shard sequence is without dropout, got --dropout {0}")]
    Dropout(f64),
    /// One device alone, which has nobody to share with.
    #[error("--shard sequence is of several devices: name them with --devices")]
    Alone,
    /// Replayed steps.
    #[error("--graph replays the steps of one device alone; leave it out with --devices")]
    Graph,
    /// State that follows a whole batch.
    #[error(
        "--attention {0} has means that follow all bytes of a batch, of which each device sees a part; train it with --device"
    )]
    Means(String),
    /// NCCL, of devices that it does not know.
    #[error("--reduce nccl is of CUDA devices, got {0}")]
    NotCuda(String),
    /// NCCL, with a device twice.
    #[error("--reduce nccl takes each device once, got {0} twice; with --reduce copies it can be")]
    Twice(String),
    /// NCCL, which is not there.
    #[error("--reduce nccl cannot be used: {0}; --reduce copies needs nothing")]
    NoNccl(String),
    /// An error or a panic in one device's part of a step.
    #[error(
        "device {device} failed: {reason}; checkpoints are as they were: continue from the last one with --resume"
    )]
    Failed {
        device: String,
        /// The error, or the panic's message.
        reason: String,
    },
    /// Devices that took different steps.
    #[error(
        "device {device} has the gradients' norm {norm}, and {first} has {expected}: they no longer train the same model. Continue from the last \
         checkpoint with --resume, with --reduce copies or on one device"
    )]
    Parted {
        first: String,
        device: String,
        /// Of the first one.
        expected: f32,
        /// Of the other one.
        norm: f32,
    },
}

/// Whether a device failed in the middle of a step, so that others may wait for it for ever.
pub fn is_lost(error: &anyhow::Error) -> bool {
    (error.chain())
        .filter_map(|cause| cause.downcast_ref())
        .any(|cause| matches!(cause, DevicesError::Failed { .. }))
}
