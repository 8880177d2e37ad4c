//! Sums of rows selected by an index.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::indexed::{IndexedRows, Sizes, row_at};
use super::norm_shape::{LANE_NUMBERS, place, store_row, tile_of};
use super::typed::Typed;
use crate::args::{address_of, buffer, spread};
use crate::error::KernelError;
use crate::shared::row_tile::RowTile;

/// Rows that a unit loads at once, if an index has as many entries. When few of many entries are valid, it would otherwise wait for each load.
const AHEAD: usize = 8;

/// Computes `output[place] = Σ rows[index[place, j]]`, without the entries that are out of range.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather<E: Float, A: Float, N: Size>(
    rows: &[Vector<E, N>],
    index: &[i32],
    output: &mut [Vector<E, N>],
    sizes: Sizes,
    #[comptime] tile: RowTile,
    #[comptime] ahead: usize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let at = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    if at < sizes.count {
        let mut sums = Array::<Vector<A, N>>::new(vectors);
        #[unroll]
        for i in 0..vectors {
            sums[i] = Vector::<A, N>::zeroed();
        }
        let first = at / sizes.places * sizes.rows;
        let mut named = Array::<i32>::new(ahead);
        for group in 0..sizes.most.div_ceil(ahead) {
            #[unroll]
            for j in 0..ahead {
                named[j] = row_at(index, at, group * ahead + j, &sizes);
            }
            #[unroll]
            for j in 0..ahead {
                if named[j] >= 0i32 {
                    let start = (first + named[j] as usize) * row_vectors;
                    #[unroll]
                    for i in 0..vectors {
                        sums[i] += Vector::<A, N>::cast_from(rows[start + place(lane, i, tile)]);
                    }
                }
            }
        }
        store_row::<E, A, N>(output, &sums, at * row_vectors, true, lane, tile);
    }
}

/// Sums the rows that an index selects: `output` `[lists, places, width]` has the element type of `rows` `[lists, rows, width]`. Negative index entries are
/// skipped.
///
/// # Errors
/// [`KernelError`] if the device does not index as many elements, or has no cube for a row.
pub fn gather_rows(
    client: &Client,
    of: &IndexedRows,
    (rows, element): Typed,
    index: &Handle,
    output: &Handle,
) -> Result<(), KernelError> {
    let tile = tile_of(client.properties(), of.width, element, LANE_NUMBERS)?;
    let count = of.lists * of.places;
    let address = address_of(client, of.len())?;
    let cubes = spread(client, count.div_ceil(tile.rows) as u64)?;
    if count == 0 {
        return Ok(());
    }
    // SAFETY: a unit below `count` reads rows of its list below `rows` and its own place's index entries, and writes its place's row.
    unsafe {
        gather::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(rows, of.lists * of.rows * tile.row_vectors),
            buffer(index, count * of.most),
            buffer(output, count * tile.row_vectors),
            of.sizes(),
            tile,
            if of.most >= AHEAD { AHEAD } else { 1 },
            [element, super::accumulator_of(element)],
        );
    }
    Ok(())
}
