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
        /// The first one.
        first: String,
        /// The first one of another kind.
        other: String,
    },
    /// Windows that cannot be shared out equally.
    #[error("--batch must be a multiple of the {devices} devices of --devices, got {batch}")]
    Batch {
        /// How many there are.
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
    /// A way for keys to cross, where none do.
    #[error("--exchange and --share are of --shard sequence, whose keys cross between devices")]
    NoKeys,
    /// Devices that cannot be divided into sets.
    #[error("--share must divide the {devices} devices of --devices, got {share}")]
    Share {
        /// How many there are.
        devices: usize,
        /// How many share a sequence.
        share: usize,
    },
    /// Windows that cannot be shared out equally to sets of devices.
    #[error(
        "--batch must be a multiple of the {sets} sets of devices that share sequences, got {batch}"
    )]
    Sets {
        /// How many there are.
        sets: usize,
        /// Windows of a step.
        batch: usize,
    },
    /// Replayed steps.
    #[error("--graph replays the steps of one device alone; leave it out with --devices")]
    Graph,
    /// State that follows a whole batch.
    #[error(
        "--attention {0} has means that follow all bytes of a batch, of which each device sees a part; train it with --device"
    )]
    Means(String),
    /// NCCL, of devices that it does not know.
    #[error("{way} is of CUDA devices, got {got}")]
    NotCuda {
        /// The flag.
        way: &'static str,
        /// A device's name.
        got: String,
    },
    /// NCCL, with a device twice.
    #[error("{way} takes each device once, got {got} twice; with {other} it can be")]
    Twice {
        /// The flag.
        way: &'static str,
        /// The flag of the other way.
        other: &'static str,
        /// The device's name.
        got: String,
    },
    /// NCCL, which is not there.
    #[error("{way} cannot be used: {reason}; {other} needs nothing")]
    NoNccl {
        /// The flag.
        way: &'static str,
        /// The flag of the other way.
        other: &'static str,
        /// What is missing.
        reason: String,
    },
    /// An error or a panic in one device's part of a step.
    #[error(
        "device {device} failed: {reason}; checkpoints are as they were: continue from the last one with --resume"
    )]
    Failed {
        /// Its name.
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
        /// The first one.
        first: String,
        /// The other one.
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
