//! Product of a tensor with scalars on the device.

use crate::kernels::prelude::*;

const UNITS: u32 = 256;

/// Computes `output = input · left · right`, in `A`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn scale<E: Float, A: Float, O: Float, N: Size>(
    input: &[Vector<E, N>],
    left: &[A],
    right: &[A],
    output: &mut [Vector<O, N>],
    vectors: usize,
    #[define(E, A, O)] _types: [ElemType; 3],
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let factor = left[0] * right[0];
        let value = Vector::<A, N>::cast_from(input[at]) * Vector::new(factor);
        output[at] = Vector::<O, N>::cast_from(value);
    }
}

/// Computes `output = input · left · right` for `len` elements and two scalars in buffers, in the type of sums of `element`.
///
/// # Errors
/// [`KernelError`] if the device lacks a type or cannot index the elements.
pub fn scaled(
    client: &Client,
    (input, element): (&Handle, ElemType),
    [left, right]: [&Handle; 2],
    (output, output_element): (&Handle, ElemType),
    len: usize,
) -> Result<(), KernelError> {
    if len == 0 {
        return Ok(());
    }
    let accumulator = accumulator_of(element);
    check_types(client.properties(), [element, output_element])?;
    let widest = element.size().max(output_element.size());
    let vector = vector_of(client.properties(), widest, &[len]);
    let vectors = len / vector;
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let address = address_of(client, len)?;
    let cubes = spread(client, vectors.div_ceil(units as usize) as u64)?;
    // SAFETY: a unit reads and writes one vector below `vectors`; the buffers have the declared lengths (see `buffer`).
    unsafe {
        scale::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units),
            address,
            vector,
            buffer(input, vectors),
            buffer(left, 1),
            buffer(right, 1),
            buffer(output, vectors),
            vectors,
            [element, accumulator, output_element],
        );
    }
    Ok(())
}
