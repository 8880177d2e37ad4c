//! What is wrong with one of several devices.

use thiserror::Error;

/// An error or a panic in one device's part of a step, or an error in another process, or its end.
#[derive(Debug, Error)]
#[error("{what}: {reason}; checkpoints are as they were: continue from the last one with --resume")]
pub struct Lost {
    /// E.g. `rank 1 is lost`.
    pub what: String,
    /// The error, the panic's message, or how it was noticed.
    pub reason: String,
}
