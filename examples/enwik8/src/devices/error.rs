//! Failure of one of several devices.

use thiserror::Error;

/// Error or panic in one device's part of a step, or an error in another process, or its end.
#[derive(Debug, Error)]
#[error("{what}: {reason}; checkpoints are as they were: continue from the last one with --resume")]
pub struct Lost {
    /// What failed, such as `rank 1 is lost`.
    pub what: String,
    /// The error, the panic's message, or how the failure was detected.
    pub reason: String,
}
