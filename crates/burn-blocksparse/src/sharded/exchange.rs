//! By which way blocks cross between devices.

use std::fmt;

use burn::tensor::Device;

use crate::base::device::check_collectives;
use crate::error::OpError;

/// By which way keys, values and their gradients cross between the devices of a group.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Exchange {
    /// By way of the host: between any devices, also of two kinds.
    Host {
        /// Why not by NCCL, between CUDA devices without it.
        instead: Option<String>,
    },
    /// By NCCL, through Burn's engine: between different CUDA devices. Made by [`Self::nccl`].
    #[non_exhaustive]
    Nccl {
        /// In the order of the group.
        devices: Vec<Device>,
    },
}

impl Default for Exchange {
    fn default() -> Self {
        Self::Host { instead: None }
    }
}

impl Exchange {
    /// NCCL where it can be used between these devices, the host elsewhere.
    pub fn best(devices: &[Device]) -> Self {
        Self::nccl(devices).unwrap_or_else(|error| Self::Host {
            // Other devices have no NCCL that could be missing.
            instead: match error {
                OpError::Device { .. } => Some(error.to_string()),
                _ => None,
            },
        })
    }

    /// NCCL between these devices.
    ///
    /// # Errors
    /// [`OpError`] if one is no CUDA device or there twice, or NCCL's library cannot be loaded, with what to install.
    pub fn nccl(devices: &[Device]) -> Result<Self, OpError> {
        for (at, device) in devices.iter().enumerate() {
            check_collectives(device)?;
            if devices[..at].contains(device) {
                let expected = "each once, where devices exchange by NCCL";
                return Err(OpError::argument(
                    "devices",
                    expected,
                    format!("{device:?} twice"),
                ));
            }
        }
        Ok(Self::Nccl {
            devices: devices.to_vec(),
        })
    }
}

impl fmt::Display for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { instead: None } => f.write_str("the host"),
            Self::Host {
                instead: Some(reason),
            } => write!(f, "the host (not NCCL: {reason})"),
            Self::Nccl { .. } => f.write_str("NCCL"),
        }
    }
}
