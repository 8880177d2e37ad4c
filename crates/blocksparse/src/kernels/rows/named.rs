//! Which numbers of an index name rows, found by the units of a plane together: few of many do, so that units would wait for each.
//!
//! The units of a row load different numbers of [`NUMBERS`] and vote; bits of those that name a row are left to each row's units, which then load its rows
//! two at a time.

use cubecl::prelude::*;

use super::gather::{Sizes, named};
use super::norm_shape::place;
use super::tile::RowTile;
use crate::kernels::on_device::planes;

/// Numbers that are looked at together.
pub(super) const NUMBERS: usize = 64;

/// Fewest units of a row: the others have this part of [`NUMBERS`] to load each.
const FEWEST: usize = 4;

/// Whether planes find what places name that have so many numbers.
pub(super) fn by_planes(client: &Client, most: usize, tile: &RowTile) -> bool {
    let properties = client.properties();
    planes::are_there(properties)
        && planes::have_ptx(properties)
        && most >= NUMBERS / FEWEST
        && tile.lanes.is_power_of_two()
        && (FEWEST..=planes::LANES).contains(&tile.lanes)
        && tile.units().is_multiple_of(planes::LANES)
}

/// Bits of [`NUMBERS`] numbers, the first ones in `low`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Bits {
    pub low: u32,
    pub high: u32,
}

#[cube]
impl Bits {
    pub fn is_empty(&self) -> bool {
        self.low | self.high == 0u32
    }

    pub fn count(&self) -> u32 {
        self.low.count_ones() + self.high.count_ones()
    }

    /// The first one. There is one.
    pub fn first(&self) -> usize {
        let in_low = self.low != 0u32;
        let bit = select(in_low, self.low, self.high).trailing_zeros();
        select(in_low, bit, bit + 32u32) as usize
    }

    /// Without the first one, if there is one.
    pub fn rest(&self) -> Bits {
        let in_low = self.low != 0u32;
        Bits {
            low: self.low & (self.low - 1u32),
            high: select(in_low, self.high, self.high & (self.high - 1u32)),
        }
    }
}

/// Which of the numbers from `part` times [`NUMBERS`] on of place `at` name rows; none of a place that does not exist. All units of a plane are here.
#[cube]
pub(super) fn bits_of(
    index: &[i32],
    at: usize,
    exists: bool,
    part: usize,
    sizes: &Sizes,
    #[comptime] tile: RowTile,
) -> Bits {
    let lanes = comptime!(tile.lanes);
    let loads = comptime!(NUMBERS / tile.lanes);
    let unit = UNIT_POS as usize;
    let first = part * comptime!(NUMBERS) + unit % lanes;
    // Where its votes are among the plane's.
    let shift = (unit % comptime!(planes::LANES) / lanes * lanes) as u32;
    let own = comptime!(u32::MAX >> (planes::LANES - tile.lanes) as u32).runtime();
    let mut is_row = Array::<bool>::new(loads);
    #[unroll]
    for i in 0..loads {
        let number = first + comptime!(i * tile.lanes);
        let row = index[named(at, number.min(sizes.most - 1), sizes)];
        is_row[i] = exists && number < sizes.most && row >= 0i32 && (row as usize) < sizes.rows;
    }
    let mut low = 0u32.runtime();
    let mut high = 0u32.runtime();
    #[unroll]
    for i in 0..loads {
        let votes = planes::votes(is_row[i], true) >> shift & own;
        let place = comptime!((i * tile.lanes) as u32);
        if comptime!(place < 32) {
            low |= votes << place;
        } else {
            high |= votes << comptime!(place - 32);
        }
    }
    Bits { low, high }
}

/// Rows that a place names.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Two {
    pub one: usize,
    /// The one again if it is alone.
    pub other: usize,
    pub are_two: bool,
}

/// The rows that the first two of some bits name, which are taken away. There is one.
#[cube]
pub(super) fn take_two(
    index: &[i32],
    bits: &mut Bits,
    at: usize,
    part: usize,
    sizes: &Sizes,
) -> Two {
    let first = part * comptime!(NUMBERS);
    let one = bits.first();
    let rest = bits.rest();
    let are_two = !rest.is_empty();
    let other = select(are_two, rest.first(), one);
    let rest = rest.rest();
    bits.low = rest.low;
    bits.high = rest.high;
    // They were loaded for the votes, so they are near.
    Two {
        one: index[named(at, first + one, sizes)] as usize,
        other: index[named(at, first + other, sizes)] as usize,
        are_two,
    }
}

/// Adds a row times its factor to sums, and then another if there are two, which is loaded with it.
#[cube]
pub(super) fn add_two<E: Float, A: Float, N: Size>(
    rows: &[Vector<E, N>],
    of: &Two,
    one_factor: A,
    other_factor: A,
    sums: &mut Array<Vector<A, N>>,
    #[comptime] tile: RowTile,
) {
    let row_vectors = comptime!(tile.row_vectors);
    let lane = UNIT_POS as usize % comptime!(tile.lanes);
    let one_factor = Vector::<A, N>::empty().fill(one_factor);
    let other_factor = Vector::<A, N>::empty().fill(other_factor);
    #[unroll]
    for i in 0..comptime!(tile.lane_vectors()) {
        let place = place(lane, i, tile);
        let x = rows[of.one * row_vectors + place];
        let y = rows[of.other * row_vectors + place];
        sums[i] += Vector::<A, N>::cast_from(x) * one_factor;
        let y = Vector::<A, N>::cast_from(y) * other_factor;
        sums[i] += select(of.are_two, y, Vector::<A, N>::zeroed());
    }
}
