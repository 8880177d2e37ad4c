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

/// Whether a device failed in the middle of a step, so that others may wait for it for ever.
pub fn is_lost(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<Lost>())
}
