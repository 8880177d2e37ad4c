//! What a device has: types, units of a cube, elements of a load.

use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::error::KernelError;

/// That a device has all of these types.
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

/// Elements of a load of 16 bytes at most that divides rows of all these widths, where the widest number has so many bytes.
pub fn vector_of(properties: &DeviceProperties, bytes: usize, widths: &[usize]) -> usize {
    let most = (16 / bytes).min(properties.hardware.max_vector_size.max(1));
    (0..=most.ilog2())
        .rev()
        .map(|power| 1 << power)
        .find(|vector| widths.iter().all(|width| width.is_multiple_of(*vector)))
        .unwrap_or(1)
}

/// Multiprocessors, 1 of a device that does not say how many.
pub fn multiprocessors(properties: &DeviceProperties) -> usize {
    properties
        .hardware
        .num_streaming_multiprocessors
        .unwrap_or(1) as usize
}

/// Units of a cube of one dimension, at most.
pub fn most_units(properties: &DeviceProperties) -> usize {
    let hardware = &properties.hardware;
    (hardware.max_units_per_cube.min(hardware.max_cube_dim.0) as usize).max(1)
}
