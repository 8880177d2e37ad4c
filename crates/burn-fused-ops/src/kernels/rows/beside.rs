//! Matrices side by side, in another type.

use crate::kernels::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;

/// How many matrices there may be.
pub const MOST_MATRICES: usize = 3;

/// A unit rounds one vector.
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

/// A matrix whose rows are contiguous, from its first number on.
#[derive(Clone, Copy, Debug)]
pub struct BesideMatrix<'a> {
    pub handle: &'a Handle,
    pub width: usize,
    /// From one row to the next.
    pub pitch: usize,
}

/// `output = [m₁ m₂ m₃]`, rounded: `rows` of each matrix, all of one type. Three of them at most.
///
/// # Errors
/// [`KernelError`] if there are more matrices, or the device lacks a type or cannot index the numbers.
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
    // What begins within a larger buffer need not begin at a multiple of a vector.
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
    // SAFETY: a unit writes one vector below `vectors` and reads the one that belongs there; the buffers have the lengths they say (see
    // `buffer`).
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
