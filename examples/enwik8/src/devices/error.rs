//! What is wrong with one of several devices.

use thiserror::Error;

/// An error or a panic in one device's part of a step.
#[derive(Debug, Error)]
#[error(
    "device {device} failed: {reason}; checkpoints are as they were: continue from the last one with --resume"
)]
pub struct DeviceFailed {
    pub device: String,
    /// The error, or the panic's message.
    pub reason: String,
}

/// An error in another process, or its end.
#[derive(Debug, Error)]
#[error(
    "rank {rank} is lost: {reason}; checkpoints are as they were: continue from the last one with --resume"
)]
pub struct ProcessLost {
    pub rank: usize,
    /// The error, or how it was noticed.
    pub reason: String,
}

/// Whether a device failed in the middle of a step, so that others may wait for it for ever.
pub fn is_lost(error: &anyhow::Error) -> bool {
    (error.chain()).any(|cause| cause.is::<DeviceFailed>() || cause.is::<ProcessLost>())
}
