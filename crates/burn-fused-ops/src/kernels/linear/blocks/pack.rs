//! Packs kept blocks, rounded, into tiles of 64 × 64 or into the dense weight, and back.

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if, clippy::collapsible_else_if)]

use crate::kernels::linear::blocks::tables::{BlockTables, Direction, GROUP, NONE, Words};
use crate::kernels::linear::tile::SLAB;
use crate::kernels::prelude::*;

/// Units of a cube, which copies one tile: four units per row.
const UNITS: u32 = 256;
/// Elements of a vector, and vectors of a unit.
const VECTOR: usize = 4;
const VECTORS: usize = SLAB * GROUP / UNITS as usize / VECTOR;

/// Positions of 64 × 64 tiles in a matrix.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct TilePlaces {
    /// Number of tiles, and tiles along a row.
    count: usize,
    columns: usize,
    /// Rows and columns of the matrix.
    rows: usize,
    width: usize,
    /// Inputs and outputs of a block.
    block: usize,
}

/// Writes tiles of a matrix from the cells of `blocks` that `sources` names, zeros where it names none; or, with `back`, writes those cells from the tiles.
#[cube(launch_unchecked, address_type = "dynamic")]
fn copy_cells<E: Float, H: Float, N: Size>(
    from: &[Vector<E, N>],
    sources: &[u32],
    to: &mut [Vector<H, N>],
    tiles: TilePlaces,
    #[comptime] cell: usize,
    #[comptime] back: bool,
    #[define(E, H)] _types: [ElemType; 2],
) {
    let tile = CUBE_POS;
    let side = comptime!(SLAB / cell);
    if tile < tiles.count {
        let row = (UNIT_POS_X / 4) as usize;
        let first_row = tile / tiles.columns * SLAB;
        let first_column = tile % tiles.columns * GROUP;
        #[unroll]
        for j in 0..VECTORS {
            let column =
                (UNIT_POS_X % 4) as usize * comptime!(VECTORS * VECTOR) + comptime!(j * VECTOR);
            let place = tile * comptime!(side * side) + row / cell * side + column / cell;
            let source = sources[place];
            let within = source as usize + row % cell * tiles.block + column % cell;
            let at = (first_row + row) * tiles.width + first_column + column;
            let inside = first_row + row < tiles.rows && first_column + column < tiles.width;
            if comptime!(back) {
                if inside && source != NONE {
                    to[within / VECTOR] = Vector::<H, N>::cast_from(from[at / VECTOR]);
                }
            } else {
                if inside {
                    let mut four = Vector::<H, N>::zeroed();
                    if source != NONE {
                        four = Vector::<H, N>::cast_from(from[within / VECTOR]);
                    }
                    to[at / VECTOR] = four;
                }
            }
        }
    }
}

/// Copies cells of kept blocks into tiles of a matrix `[rows, width]`, or back.
fn copy(
    client: &Client,
    tables: &BlockTables,
    sources: &Words,
    [rows, width]: [usize; 2],
    (from, from_element): Typed,
    (to, to_element): Typed,
    back: bool,
) -> Result<(), KernelError> {
    let columns = width.div_ceil(GROUP);
    let count = rows.div_ceil(SLAB) * columns;
    let cubes = spread(client, count as u64)?;
    // Without blocks nothing is read or written, but an empty buffer cannot be bound.
    let (matrix, numbers) = (rows * width / VECTOR, tables.numbers / VECTOR);
    let (from, to) = match (back, tables.numbers) {
        (true, 0) => return Ok(()),
        (true, _) => (buffer(from, matrix), buffer(to, numbers)),
        (false, 0) => (buffer(to, matrix), buffer(to, matrix)),
        (false, _) => (buffer(from, numbers), buffer(to, matrix)),
    };
    let address = address_of(client, (rows * width).max(tables.numbers))?;
    // SAFETY: cubes belong to existing tiles, nothing beyond the matrix is accessed; sources are cells of the weight, which its buffer holds, since the
    // tables were built from it (see `buffer`).
    unsafe {
        copy_cells::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            address,
            VECTOR,
            from,
            buffer(&sources.handle, sources.len),
            to,
            TilePlacesLaunch::new(count, columns, rows, width, tables.block),
            tables.cell(),
            back,
            [from_element, to_element],
        );
    }
    Ok(())
}

/// Packs a weight `[blocks, block, block]` for gathered products of a direction: `packed` has [`BlockTables::packed_elements`] elements.
///
/// # Errors
/// [`KernelError::Limit`] if the device cannot index that many elements.
pub fn pack_blocks(
    client: &Client,
    tables: &BlockTables,
    direction: Direction,
    weight: Typed,
    packed: Typed,
) -> Result<(), KernelError> {
    let lists = tables.lists(direction);
    let shape = [lists.slabs * SLAB, GROUP];
    copy(client, tables, &lists.sources, shape, weight, packed, false)
}

/// Expands a weight `[blocks, block, block]` to the dense one, `[inputs, outputs]`.
///
/// # Errors
/// Those of [`pack_blocks`].
pub fn dense_of_blocks(
    client: &Client,
    tables: &BlockTables,
    weight: Typed,
    dense: Typed,
) -> Result<(), KernelError> {
    let shape = [tables.inputs, tables.outputs];
    copy(client, tables, &tables.dense, shape, weight, dense, false)
}

/// Extracts the kept blocks from a dense matrix `[inputs, outputs]`.
///
/// # Errors
/// Those of [`pack_blocks`].
pub fn blocks_of_dense(
    client: &Client,
    tables: &BlockTables,
    dense: Typed,
    weight: Typed,
) -> Result<(), KernelError> {
    let shape = [tables.inputs, tables.outputs];
    copy(client, tables, &tables.dense, shape, dense, weight, true)
}
