//! Rows by an index: sums of them, weighted by the rows' own factors, and means.

use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::indexed::{IndexedRows, NUMBERS, Search, Sizes, add_two, bits_of, load_named, take_two};
use super::norm_shape::{LANE_NUMBERS, has, place, tile_of};
use super::typed::Typed;
use crate::args::{address_of, buffer, optional, spread};
use crate::error::KernelError;
use crate::shared::row_tile::RowTile;

/// Adds a row to sums.
#[cube]
fn add_row<E: Float, A: Float, N: Size>(
    rows: &[Vector<E, N>],
    factors: &ComptimeOption<Box<[A]>>,
    row: usize,
    lane: usize,
    sums: &mut Array<Vector<A, N>>,
    #[comptime] tile: RowTile,
) {
    let start = row * comptime!(tile.row_vectors);
    let mut factor = A::new(1.0);
    #[comptime]
    match factors {
        ComptimeOption::Some(factors) => {
            factor = factors[row];
        }
        ComptimeOption::None => {}
    }
    #[unroll]
    for i in 0..comptime!(tile.lane_vectors()) {
        let x = Vector::<A, N>::cast_from(rows[start + place(lane, i, tile)]);
        sums[i] += x * Vector::<A, N>::empty().fill(factor);
    }
}

/// Adds the rows that a place names, in the order of their numbers, two at a time, and how many they are. All units of the cube are here.
#[cube]
fn add_by_planes<E: Float, A: Float, N: Size>(
    rows: &[Vector<E, N>],
    index: &[i32],
    factors: &ComptimeOption<Box<[A]>>,
    asked: usize,
    sums: &mut Array<Vector<A, N>>,
    sizes: &Sizes,
    #[comptime] tile: RowTile,
    #[comptime] search: Search,
) -> A {
    let at = asked.min(sizes.count - 1);
    let mut there = 0u32.runtime();
    for part in 0..sizes.most.div_ceil(comptime!(NUMBERS)) {
        let mut bits = bits_of(index, asked, part, sizes, tile, search);
        there += bits.count();
        while !bits.is_empty() {
            let two = take_two(index, &mut bits, at, part, sizes);
            let mut one_factor = A::new(1.0);
            let mut other_factor = A::new(1.0);
            #[comptime]
            match factors {
                ComptimeOption::Some(factors) => {
                    one_factor = factors[two.one];
                    other_factor = factors[two.other];
                }
                ComptimeOption::None => {}
            }
            add_two::<E, A, N>(rows, &two, one_factor, other_factor, sums, tile);
        }
    }
    A::cast_from(there)
}

/// `output[place] = Σ fⱼ · rows[index[place, j]]`, where what is not there is left out; without the rows' factors `f` they are 1. With `shares` the sum is
/// divided by how many rows there are, 1 at least, and what it is multiplied by is written there.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gather<E: Float, A: Float, N: Size>(
    rows: &[Vector<E, N>],
    index: &[i32],
    factors: ComptimeOption<Box<[A]>>,
    output: &mut [Vector<E, N>],
    shares: ComptimeOption<Box<[A]>>,
    sizes: Sizes,
    #[comptime] tile: RowTile,
    #[comptime] search: Search,
    #[define(E)] _element: ElemType,
    #[define(A)] _accumulator: ElemType,
) {
    let vectors = comptime!(tile.lane_vectors());
    let row_vectors = comptime!(tile.row_vectors);
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(tile.lanes);
    let at = CUBE_POS * comptime!(tile.rows) + unit / comptime!(tile.lanes);
    let mut sums = Array::<Vector<A, N>>::new(vectors);
    #[unroll]
    for i in 0..vectors {
        sums[i] = Vector::<A, N>::zeroed();
    }
    let mut there = A::new(0.0);
    if comptime!(search.ahead().is_none()) {
        there +=
            add_by_planes::<E, A, N>(rows, index, &factors, at, &mut sums, &sizes, tile, search);
    }
    if at < sizes.count {
        if comptime!(search.ahead().is_some()) {
            let first = at / sizes.places * sizes.rows;
            let ahead = comptime!(search.ahead().unwrap());
            let mut named_rows = Array::<i32>::new(ahead);
            for group in 0..sizes.most.div_ceil(ahead) {
                load_named(index, &mut named_rows, at, group * ahead, &sizes, ahead);
                #[unroll]
                for j in 0..ahead {
                    if named_rows[j] >= 0i32 {
                        there += A::new(1.0);
                        let row = first + named_rows[j] as usize;
                        add_row::<E, A, N>(rows, &factors, row, lane, &mut sums, tile);
                    }
                }
            }
        }
        #[comptime]
        match shares {
            ComptimeOption::Some(mut shares) => {
                let share = A::new(1.0) / there.max(A::new(1.0));
                #[unroll]
                for i in 0..vectors {
                    sums[i] *= Vector::<A, N>::empty().fill(share);
                }
                if lane == 0 {
                    shares[at] = share;
                }
            }
            ComptimeOption::None => {}
        }
        #[unroll]
        for i in 0..vectors {
            if has(lane, i, tile) {
                output[at * row_vectors + place(lane, i, tile)] =
                    Vector::<E, N>::cast_from(sums[i]);
            }
        }
    }
}

/// Sums of rows that an index names: `output` `[lists, places, width]` of the element of `rows` `[lists, rows, width]`, each the sum of what the index says,
/// whose negative numbers count for nothing.
///
/// # Errors
/// [`KernelError`] if the device does not index as many numbers, or has no cube for a row.
pub fn gather_rows(
    client: &Client,
    of: &IndexedRows,
    rows: Typed,
    index: &Handle,
    output: &Handle,
) -> Result<(), KernelError> {
    launch_gather(client, of, rows, index, [None, None], output)
}

/// The means of the rows that an index names, 0 where it names none: `output` `[lists, places, width]`; and `shares` `[lists, places]`, in the type of sums:
/// one over how many, or 1.
///
/// # Errors
/// As [`gather_rows`].
pub fn mean_rows(
    client: &Client,
    of: &IndexedRows,
    rows: Typed,
    index: &Handle,
    [output, shares]: [&Handle; 2],
) -> Result<(), KernelError> {
    launch_gather(client, of, rows, index, [None, Some(shares)], output)
}

/// The sums of the rows that an index names, each times its own factor of `factors` `[lists, rows]`, in the type of sums.
///
/// # Errors
/// As [`gather_rows`].
pub fn gather_scaled_rows(
    client: &Client,
    of: &IndexedRows,
    rows: Typed,
    index: &Handle,
    factors: &Handle,
    output: &Handle,
) -> Result<(), KernelError> {
    launch_gather(client, of, rows, index, [Some(factors), None], output)
}

fn launch_gather(
    client: &Client,
    of: &IndexedRows,
    (rows, element): Typed,
    index: &Handle,
    [factors, shares]: [Option<&Handle>; 2],
    output: &Handle,
) -> Result<(), KernelError> {
    let tile = tile_of(client.properties(), of.width, element, LANE_NUMBERS)?;
    let count = of.lists * of.places;
    let address = address_of(client, of.len())?;
    let cubes = spread(client, count.div_ceil(tile.rows) as u64)?;
    if count == 0 {
        return Ok(());
    }
    // SAFETY: a unit below `count` reads rows of its list below `rows` and its own place's numbers, and writes its place's row; the first its share.
    unsafe {
        gather::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units() as u32),
            address,
            tile.vector,
            buffer(rows, of.lists * of.rows * tile.row_vectors),
            buffer(index, count * of.most),
            optional(factors, of.lists * of.rows),
            buffer(output, count * tile.row_vectors),
            optional(shares, count),
            of.sizes(),
            tile,
            Search::new(client, of, &tile),
            element,
            super::accumulator_of(element),
        );
    }
    Ok(())
}
