//! Concatenation of tensors.

use crate::kernels::optim::{Deal, FlatTensor, UNITS, launches, tensors_of_launch, units_of};
use crate::kernels::prelude::*;

/// Elements per cube.
const PART: usize = 4096;

/// Computes `output[firsts[i] + j] = tensors[i][j]`, in vectors.
#[cube(launch_unchecked, address_type = "dynamic")]
fn copy_parts<E: Float, N: Size>(
    tensors: Sequence<Box<[Vector<E, N>]>>,
    output: &mut [Vector<E, N>],
    vectors: Sequence<usize>,
    firsts: Sequence<usize>,
    starts: Sequence<usize>,
    #[comptime] count: usize,
    #[comptime] units: usize,
    #[define(E)] _dtype: ElemType,
) {
    let width = N::value();
    let steps = comptime!((PART / width).div_ceil(units));
    let cube = CUBE_POS;
    #[unroll]
    for i in 0..count {
        let start = *starts.index(i);
        if cube >= start && cube < *starts.index(comptime!(i + 1)) {
            let tensor = tensors.index(i);
            let end = *vectors.index(i);
            let first = *firsts.index(i);
            let begin = (cube - start) * comptime!(PART / width) + UNIT_POS as usize;
            for step in 0..steps {
                let at = begin + step * units;
                if at < end {
                    output[first + at] = tensor[at];
                }
            }
        }
    }
}

/// Copies all `tensors` contiguously into `output` from element `first` on; all are of one type.
///
/// # Errors
/// [`KernelError::Limit`] if the output has more elements than the device indexes, or the device binds too few buffers.
pub fn concat(
    client: &Client,
    tensors: &[FlatTensor],
    output: &FlatTensor,
    first: usize,
) -> Result<(), KernelError> {
    let most = tensors_of_launch(client, 1, 1)?;
    let dtype = output.dtype;
    let widest = output.vector(client, dtype.size());
    let mut next = first;
    let tensors = tensors.iter().filter(|tensor| tensor.elements > 0);
    let tensors = tensors.map(|tensor| {
        let first = next;
        next += tensor.elements;
        let own = tensor.vector(client, dtype.size()).min(widest);
        let vector = [own, 2, 1]
            .into_iter()
            .find(|vector| *vector <= own && first.is_multiple_of(*vector));
        (vector.unwrap_or(1), (tensor, first))
    });
    let launches = launches(tensors, most);
    let units = units_of(client, UNITS);
    for (vector, held) in launches {
        let elements = held.iter().map(|(tensor, _)| tensor.elements);
        let deal = Deal::new(client, elements.clone(), PART, output.elements)?;
        // SAFETY: a unit reads a tensor below its length and writes as many elements of the output, which has space for all tensors; the buffers have the
        // declared lengths (see `buffer`).
        unsafe {
            copy_parts::launch_unchecked(
                client,
                deal.cubes,
                CubeDim::new_1d(units as u32),
                deal.address,
                vector,
                held.iter().map(|(tensor, _)| tensor.arg(vector)).collect(),
                output.arg(vector),
                elements.map(|elements| elements / vector).collect(),
                held.iter().map(|(_, first)| first / vector).collect(),
                deal.starts.into_iter().collect(),
                held.len(),
                units,
                dtype,
            );
        }
    }
    Ok(())
}
