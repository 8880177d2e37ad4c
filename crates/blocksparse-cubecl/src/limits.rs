//! Limits of a device: types, units per cube, elements per load.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::error::KernelError;

/// Checks that a device supports all `types`.
///
/// # Errors
/// [`KernelError::Dtype`] names the first that it lacks.
pub fn check_types(
    properties: &DeviceProperties,
    types: impl IntoIterator<Item = ElemType>,
) -> Result<(), KernelError> {
    let lacks = |element: &ElemType| !properties.supports_type(*element);
    match types.into_iter().find(lacks) {
        None => Ok(()),
        Some(element) => Err(KernelError::Dtype {
            dtype: format!("{element:?}"),
        }),
    }
}

/// Returns the largest vector, in elements and at most 16 bytes, that divides all `widths`. `bytes` is the size of the widest element.
pub fn vector_of(properties: &DeviceProperties, bytes: usize, widths: &[usize]) -> usize {
    let most = (16 / bytes).min(properties.hardware.max_vector_size.max(1));
    (0..=most.ilog2())
        .rev()
        .map(|power| 1 << power)
        .find(|vector| widths.iter().all(|width| width.is_multiple_of(*vector)))
        .unwrap_or(1)
}

/// Number of multiprocessors, 1 if the device does not report it.
pub fn multiprocessors(properties: &DeviceProperties) -> usize {
    properties
        .hardware
        .num_streaming_multiprocessors
        .unwrap_or(1) as usize
}

/// Largest number of units of a one-dimensional cube.
pub fn most_units(properties: &DeviceProperties) -> usize {
    let hardware = &properties.hardware;
    (hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize).max(1)
}
