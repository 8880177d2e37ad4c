//! How many rows of a cube are in each bucket, and how many of a row's own are before it.

use cubecl::prelude::*;

use crate::kernels::rows::order_places::NONE;
use crate::kernels::rows::order_tiles::{MOST_BUCKETS, TILE};
use blocksparse_cubecl::arch::planes;
use blocksparse_cubecl::shared::bins::Bins;

/// Counts the rows of each bucket of a cube, and those before a unit's that are in its own.
#[cube]
pub(crate) fn count_by_units(bucket: u32, counts: &mut [u32], first: usize, buckets: usize) -> u32 {
    let mut tile = Shared::<[u32]>::new_slice(TILE);
    let mut numbers = Shared::<[u32]>::new_slice(MOST_BUCKETS);
    let unit = UNIT_POS as usize;
    tile[unit] = bucket;
    let mut at = unit;
    while at < buckets {
        numbers[at] = 0u32;
        at += TILE;
    }
    sync_cube();
    let mut before = 0u32.runtime();
    let mut behind = 0u32.runtime();
    for other in 0..TILE {
        let same = select(tile[other] == bucket, 1u32, 0u32);
        before += select(other < unit, same, 0u32);
        behind += select(other > unit, same, 0u32);
    }
    // The last of a bucket writes for all.
    if bucket != NONE && behind == 0u32 {
        numbers[bucket as usize] = before + 1u32;
    }
    sync_cube();
    let mut at = unit;
    while at < buckets {
        counts[first + at] = numbers[at];
        at += TILE;
    }
    before
}

/// The sum of a word's four bytes, which is one.
#[cube]
fn sum_of_bytes(word: u32) -> u32 {
    (word * 0x0101_0101u32) >> 24u32
}

/// [`count_by_units`] where units of a plane find those of the same bucket, the first of which counts for all: a bucket has a byte of each of four planes.
#[cube]
pub(crate) fn count_by_planes(
    bucket: u32,
    counts: &mut [u32],
    first: usize,
    buckets: usize,
) -> u32 {
    let bins = Bins::new(MOST_BUCKETS, true);
    let unit = UNIT_POS as usize;
    let mut at = unit;
    while at < buckets {
        bins.clear(at, true);
        at += TILE;
    }
    sync_cube();
    let of_plane = UNIT_POS / comptime!(planes::LANES as u32) * 8;
    let same = planes::alike(bucket);
    let in_plane = (same & ((1u32 << (UNIT_POS % 32)) - 1u32)).count_ones();
    if bucket != NONE && in_plane == 0u32 {
        bins.add(bucket as usize, same.count_ones() << of_plane, true);
    }
    sync_cube();
    let mut before = in_plane;
    if bucket != NONE {
        let of_planes = bins.get(bucket as usize, true);
        before += sum_of_bytes(of_planes & ((1u32 << of_plane) - 1u32));
    }
    let mut at = unit;
    while at < buckets {
        counts[first + at] = sum_of_bytes(bins.get(at, true));
        at += TILE;
    }
    before
}
