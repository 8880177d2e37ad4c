//! Plans of ops that layers consist of.

use std::fmt;

use burn::tensor::Device;

/// Plan of a call: what runs, and why nothing faster does. Implements [`Display`](fmt::Display).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpPlan {
    /// Burn's operations, one after the other.
    Primitives {
        /// The device.
        device: String,
        /// Reason why kernels do not support the call. `None` if the backend has no kernels.
        reason: Option<String>,
    },
    /// Our kernels, with their launch parameters.
    Kernels(String),
}

impl OpPlan {
    /// Returns whether our kernels run.
    pub fn is_kernels(&self) -> bool {
        matches!(self, Self::Kernels(_))
    }

    /// Creates the plan of a call on `device`. `kernels` returns the launch parameters on a CubeCL device, or the reason why it cannot launch.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn new<E: fmt::Display>(
        device: &Device,
        kernels: impl FnOnce(&OpDevice) -> Result<String, E>,
    ) -> Self {
        #[cfg_attr(not(feature = "cube"), allow(unused_mut))]
        let mut reason = None;
        #[cfg(feature = "cube")]
        if let Some(inner) = &crate::base::device::cube::of(device) {
            if crate::base::cube::uses_reference() {
                reason = Some("BLOCKSPARSE_REFERENCE is set".to_string());
            } else {
                match kernels(inner) {
                    Ok(text) => return Self::Kernels(text),
                    Err(error) => reason = Some(error.to_string()),
                }
            }
        }
        Self::Primitives {
            device: format!("{:?}", device.clone().without_autodiff().as_dispatch()),
            reason,
        }
    }
}

/// A device with kernels.
#[cfg(feature = "cube")]
pub type OpDevice = burn_cubecl::CubeDevice;

/// A device with kernels. Without the feature there is none.
#[cfg(not(feature = "cube"))]
pub type OpDevice = std::convert::Infallible;

/// Reason why a crate that is built without its feature `cube` runs no kernels, whatever features this crate has.
pub const NO_KERNELS: &str = "this crate was built without the feature of the device's backend";

impl fmt::Display for OpPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernels(text) => f.write_str(text),
            Self::Primitives {
                device,
                reason: None,
            } => write!(f, "Burn's primitives on {device}"),
            Self::Primitives {
                device,
                reason: Some(reason),
            } => write!(f, "Burn's primitives on {device}, because {reason}"),
        }
    }
}
