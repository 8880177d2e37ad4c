//! Concatenation of matrices along their columns, with a cast.

use crate::kernels::prelude::*;

const UNITS: u32 = 256;

/// Most matrices of a launch.
pub const MOST_MATRICES: usize = 3;

/// Casts and writes one vector per unit.
#[cube(launch_unchecked, address_type = "dynamic")]
fn beside<E: Float, O: Float, N: Size>(
    inputs: Sequence<Box<[Vector<E, N>]>>,
    output: &mut [Vector<O, N>],
    vectors: usize,
    #[comptime] widths: [usize; MOST_MATRICES],
    #[comptime] pitches: [usize; MOST_MATRICES],
    #[comptime] count: usize,
    #[define(E, O)] _types: [ElemType; 2],
) {
    let all = comptime!(widths.iter().sum::<usize>());
    if ABSOLUTE_POS < vectors {
        let row = ABSOLUTE_POS / all;
        let column = ABSOLUTE_POS % all;
        #[unroll]
        for index in 0..count {
            let start = comptime!(widths[..index].iter().sum::<usize>());
            if column >= start && column < comptime!(start + widths[index]) {
                let at = row * comptime!(pitches[index]) + column - start;
                output[ABSOLUTE_POS] = Vector::<O, N>::cast_from(inputs[index][at]);
            }
        }
    }
}

/// Matrix with contiguous rows; the handle begins at its first element.
#[derive(Clone, Copy, Debug)]
pub struct BesideMatrix<'a> {
    pub handle: &'a Handle,
    pub width: usize,
    /// Distance between rows, in elements.
    pub pitch: usize,
}

/// Computes `output = [m₁ m₂ m₃]`, rounded: `rows` rows of each matrix, all of one type, at most three matrices.
///
/// # Errors
/// [`KernelError`] if there are too many matrices, or the device lacks a type or cannot index the elements.
pub fn rounded_beside(
    client: &Client,
    matrices: &[BesideMatrix],
    element: ElemType,
    rows: usize,
    (output, output_type): (&Handle, ElemType),
) -> Result<(), KernelError> {
    let width: usize = matrices.iter().map(|matrix| matrix.width).sum();
    if rows * width == 0 {
        return Ok(());
    }
    KernelError::check("matrices", MOST_MATRICES as u64, matrices.len())?;
    check_types(client.properties(), [element, output_type])?;
    let widest = element.size().max(output_type.size());
    // An empty buffer cannot be bound.
    let some = || matrices.iter().filter(|matrix| matrix.width > 0);
    let lengths = some().flat_map(|matrix| [matrix.width, matrix.pitch]);
    // A slice of a larger buffer may begin at an offset that is not a multiple of the vector.
    let starts =
        some().map(|matrix| matrix.handle.offset_start.unwrap_or(0) as usize / element.size());
    let divided: Vec<usize> = lengths.chain(starts).collect();
    let vector = vector_of(client.properties(), widest, &divided);
    let (mut widths, mut pitches) = ([0; MOST_MATRICES], [0; MOST_MATRICES]);
    let mut inputs = SequenceArg::new();
    let mut largest = rows * width;
    for (index, matrix) in some().enumerate() {
        let reach = (rows - 1) * matrix.pitch + matrix.width;
        (widths[index], pitches[index]) = (matrix.width / vector, matrix.pitch / vector);
        largest = largest.max(reach);
        inputs.push(buffer(matrix.handle, reach / vector));
    }
    let vectors = rows * width / vector;
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let address = address_of(client, largest)?;
    let cubes = spread(client, vectors.div_ceil(units as usize) as u64)?;
    // SAFETY: a unit writes one vector below `vectors` and reads its source; the buffers have the declared lengths (see `buffer`).
    unsafe {
        beside::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units),
            address,
            vector,
            inputs,
            buffer(output, vectors),
            vectors,
            widths,
            pitches,
            some().count(),
            [element, output_type],
        );
    }
    Ok(())
}
