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

/// Whether a device failed in the middle of a step, so that others may wait for it for ever.
pub fn is_lost(error: &anyhow::Error) -> bool {
    (error.chain()).any(|cause| cause.is::<DeviceFailed>())
}
