//! Whether kernels run on a device.

use burn::tensor::Device;

/// Whether kernels run on a device, and not the reference.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub(crate) fn runs_kernels(device: &Device) -> bool {
    #[cfg(feature = "cube")]
    if crate::device::cube::of(device).is_some() {
        return !crate::backends::cube::uses_reference();
    }
    false
}
