//! Transports for blocks between devices.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;

use crate::base::device::check_collectives;
use crate::error::OpError;
use crate::processes::Processes;

/// Exchange of keys, values and their gradients between the devices of a group.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Exchange {
    /// Through the host: between any devices, also of different kinds.
    Host {
        /// Reason why NCCL is not used between CUDA devices.
        instead: Option<String>,
    },
    /// By NCCL, through CubeCL: between different CUDA devices. Created by [`Self::nccl`].
    #[non_exhaustive]
    Nccl {
        /// Devices in the order of the group.
        devices: Vec<Device>,
    },
    /// Through hosts and TCP: between processes with one device each. Created by [`Self::processes`].
    #[non_exhaustive]
    Processes {
        /// This process in its group.
        processes: Arc<Processes>,
        /// Ranks of the processes that share the sequence.
        ranks: Range<usize>,
    },
}

impl Default for Exchange {
    fn default() -> Self {
        Self::Host { instead: None }
    }
}

impl Exchange {
    /// Selects NCCL if it can be used between these devices, otherwise the host.
    pub fn best(devices: &[Device]) -> Self {
        Self::nccl(devices).unwrap_or_else(|error| Self::Host {
            // For other devices NCCL is not missing, so there is no reason to report.
            instead: match error {
                OpError::Device { .. } => Some(error.to_string()),
                _ => None,
            },
        })
    }

    /// Selects TCP between the processes of these ranks, which must include this one. A group then contains only the shard of this process.
    ///
    /// # Errors
    /// [`OpError::Argument`] if this process is not among the ranks, or a rank does not exist.
    pub fn processes(processes: &Arc<Processes>, ranks: Range<usize>) -> Result<Self, OpError> {
        let (rank, count) = (processes.rank(), processes.count());
        if !ranks.contains(&rank) || ranks.end > count {
            let expected = format!("some of 0..{count} with {rank}, this process");
            return Err(OpError::argument("ranks", expected, format!("{ranks:?}")));
        }
        Ok(Self::Processes {
            processes: processes.clone(),
            ranks,
        })
    }

    /// Returns the number of devices, if the exchange determines it.
    pub(super) fn devices(&self) -> Option<usize> {
        match self {
            Self::Host { .. } => None,
            Self::Nccl { devices } => Some(devices.len()),
            Self::Processes { ranks, .. } => Some(ranks.len()),
        }
    }

    /// Selects NCCL between these devices.
    ///
    /// # Errors
    /// [`OpError`] if one is not a CUDA device or is listed twice, or if NCCL's library cannot be loaded, with installation instructions.
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
            Self::Processes { .. } => f.write_str("the host and TCP"),
        }
    }
}
