//! Kept blocks as tiles of 64 × 64, rounded.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::super::tile::SLAB;
use super::tables::{BlockTables, Direction, GROUP, NONE};
use crate::kernels::args::{buffer, spread};
use crate::kernels::error::KernelError;

/// Units of a cube, which has a tile: four of a row.
const UNITS: u32 = 256;
/// Numbers of a vector, and vectors of a unit.
const VECTOR: usize = 4;
const VECTORS: usize = SLAB * GROUP / UNITS as usize / VECTOR;

/// Cells of `weight` where `sources` says, zeros where it says that there is none.
#[cube(launch_unchecked)]
fn pack<E: Float, H: Float, N: Size>(
    weight: &[Vector<E, N>],
    sources: &[u32],
    packed: &mut [Vector<H, N>],
    slabs: usize,
    block: usize,
    #[comptime] cell: usize,
    #[define(E)] _element: ElemType,
    #[define(H)] _half: ElemType,
) {
    let slab = CUBE_POS;
    let side = comptime!(SLAB / cell);
    let row = (UNIT_POS_X / 4) as usize;
    if slab < slabs {
        #[unroll]
        for j in 0..VECTORS {
            let column =
                (UNIT_POS_X % 4) as usize * comptime!(VECTORS * VECTOR) + comptime!(j * VECTOR);
            let place = slab * comptime!(side * side) + row / cell * side + column / cell;
            let source = sources[place];
            let mut four = Vector::<H, N>::zeroed();
            if source != NONE {
                let first = source as usize + row % cell * block + column % cell;
                four = Vector::<H, N>::cast_from(weight[first / VECTOR]);
            }
            packed[(slab * SLAB + row) * comptime!(GROUP / VECTOR) + column / VECTOR] = four;
        }
    }
}

/// Packs a weight `[blocks, block, block]` for products of a direction: `packed` has [`BlockTables::packed_numbers`] numbers of `half`.
///
/// # Errors
/// [`KernelError::Limit`] if it is more than what the device indexes.
pub fn pack_blocks(
    client: &Client,
    tables: &BlockTables,
    direction: Direction,
    (weight, element): (&Handle, ElemType),
    (packed, half): (&Handle, FloatKind),
) -> Result<(), KernelError> {
    let walk = tables.walk(direction);
    let cubes = spread(client, walk.slabs as u64)?;
    // Without blocks there is nothing to read, but a buffer of nothing cannot be bound.
    let (weight, vectors) = match tables.numbers {
        0 => (packed, 1),
        numbers => (weight, numbers / VECTOR),
    };
    // SAFETY: cubes are of slabs that exist; sources are cells of the weight, which the buffer holds, as the tables were made of it (see `buffer`).
    unsafe {
        pack::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            VECTOR,
            buffer(weight, vectors),
            buffer(&walk.sources.handle, walk.sources.len),
            buffer(packed, walk.slabs * SLAB * GROUP / VECTOR),
            walk.slabs,
            tables.block,
            tables.cell(),
            element,
            ElemType::Float(half),
        );
    }
    Ok(())
}
