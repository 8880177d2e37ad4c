//! Whether kernels run on a device.

use burn::tensor::Device;

/// Returns whether kernels of this crate run on a device, and not the reference: on GPUs that a feature of the crate serves, unless the environment asks for the
/// reference.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub fn runs_kernels(device: &Device) -> bool {
    #[cfg(feature = "cube")]
    if crate::base::device::cube::of(device).is_some() {
        return !crate::base::cube::uses_reference();
    }
    false
}
