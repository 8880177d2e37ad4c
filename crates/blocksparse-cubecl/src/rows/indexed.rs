//! Indices of rows: lists of numbers, few of which may name rows, and how units find those.
//!
//! Where planes can vote, the units of a row load different numbers of [`NUMBERS`], and bits of those that name a row are left to each row's units, which
//! then load its rows two at a time: few of many name one, so that units would wait for each.

use cubecl::prelude::*;

use super::norm_shape::place;
use crate::arch::planes;
use crate::shared::row_tile::RowTile;

/// Lists of rows, and of places that name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexedRows {
    /// Batch entries times heads.
    pub lists: usize,
    /// Rows of a list that are named.
    pub rows: usize,
    /// Rows of a list that are made of them.
    pub places: usize,
    /// Rows that a place names: numbers of the index, i32 `[lists, places, most]`, negative for none.
    pub most: usize,
    /// Elements of a row.
    pub width: usize,
    /// Whether the index is `[lists, most, places]`.
    pub turned: bool,
}

impl IndexedRows {
    /// Of lists of so many rows, and places that name up to `most` of them.
    pub fn new(lists: usize, rows: usize, [places, most]: [usize; 2], width: usize) -> Self {
        Self {
            lists,
            rows,
            places,
            most,
            width,
            turned: false,
        }
    }

    /// Sets whether the index is `[lists, most, places]`.
    pub fn turned(self, turned: bool) -> Self {
        Self { turned, ..self }
    }

    /// Numbers of the largest of the tensors.
    pub(super) fn len(&self) -> usize {
        let rows = self.rows.max(self.places) * self.width;
        self.lists * rows.max(self.places * (self.most + 1))
    }

    pub(super) fn sizes(&self) -> SizesLaunch {
        let count = self.lists * self.places;
        let [by_place, by_number] = match self.turned {
            true => [1, self.places],
            false => [self.most, 1],
        };
        SizesLaunch::new(
            self.rows,
            self.places,
            self.most,
            count,
            by_place,
            by_number,
        )
    }
}

/// What a launch reads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    /// Of a list.
    pub rows: usize,
    pub places: usize,
    pub most: usize,
    /// Places of all lists.
    pub count: usize,
    /// From a place's numbers in the index to the next one's,
    by_place: usize,
    /// and from one of a place's to the next.
    by_number: usize,
}

/// Where number `j` of a place is in the index.
#[cube]
pub(super) fn named(at: usize, j: usize, sizes: &Sizes) -> usize {
    let first = at / sizes.places * sizes.places * sizes.most;
    first + at % sizes.places * sizes.by_place + j * sizes.by_number
}

/// The row of its list that a number of a place names, −1 for none.
#[cube]
fn row_at(index: &[i32], at: usize, number: usize, sizes: &Sizes) -> i32 {
    let row = index[named(at, number.min(sizes.most - 1), sizes)];
    let is_there = number < sizes.most && row >= 0i32 && (row as usize) < sizes.rows;
    select(is_there, row, -1i32)
}

/// The rows that numbers from `j` on of a place name, −1 for none.
#[cube]
pub(super) fn load_named(
    index: &[i32],
    named_rows: &mut Array<i32>,
    at: usize,
    j: usize,
    sizes: &Sizes,
    #[comptime] ahead: usize,
) {
    #[unroll]
    for i in 0..ahead {
        named_rows[i] = row_at(index, at, j + i, sizes);
    }
}

/// Numbers that are looked at together.
pub(super) const NUMBERS: usize = 64;

/// Numbers that a unit loads together by itself, where there are as many: few of many name a row, so that it would wait for each.
const AHEAD: usize = 8;

/// Fewest units of a row: the others have this part of [`NUMBERS`] to load each.
const FEWEST: usize = 4;

/// How units find what a place names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Search {
    /// Each unit of a row by itself, so many numbers together.
    Alone { ahead: usize },
    /// The units of a row look at different numbers of a place.
    ByPlaces,
    /// The units of a plane look at the same numbers of neighbouring places, which are neighbours in memory.
    ByNumbers,
}

impl Search {
    pub fn new(client: &Client, of: &IndexedRows, tile: &RowTile) -> Self {
        let properties = client.properties();
        let by_planes = planes::are_there(properties)
            && planes::have_ptx(properties)
            && of.most >= NUMBERS / FEWEST
            && tile.lanes.is_power_of_two()
            && (FEWEST..=planes::LANES).contains(&tile.lanes)
            && tile.units().is_multiple_of(planes::LANES);
        match (
            by_planes,
            of.turned && planes::LANES.is_multiple_of(tile.rows),
        ) {
            (false, _) => Self::Alone {
                ahead: if of.most >= AHEAD { AHEAD } else { 1 },
            },
            (true, false) => Self::ByPlaces,
            (true, true) => Self::ByNumbers,
        }
    }

    /// How many numbers a unit that looks alone loads together, if it does.
    pub fn ahead(&self) -> Option<usize> {
        match self {
            Self::Alone { ahead } => Some(*ahead),
            Self::ByPlaces | Self::ByNumbers => None,
        }
    }
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

/// Which of the numbers from `part` times [`NUMBERS`] on of the place of a unit's row name rows: place `asked`, or none if it does not exist. All units of
/// the cube are here.
#[cube]
pub(super) fn bits_of(
    index: &[i32],
    asked: usize,
    part: usize,
    sizes: &Sizes,
    #[comptime] tile: RowTile,
    #[comptime] search: Search,
) -> Bits {
    let lanes = comptime!(tile.lanes);
    let loads = comptime!(NUMBERS / tile.lanes);
    let unit = UNIT_POS as usize;
    let first = part * comptime!(NUMBERS);
    let mut is_row = Array::<bool>::new(loads);
    if comptime!(search == Search::ByNumbers) {
        // The words that a plane writes have a number's bits of all of the cube's places.
        let rows = comptime!(tile.rows);
        let together = comptime!(planes::LANES / tile.rows);
        let mut words = Shared::<[u32]>::new_slice(comptime!(NUMBERS));
        let lane = unit % comptime!(planes::LANES);
        let of_rows = lane % rows;
        let of_lane = asked - unit / lanes + of_rows;
        let own = comptime!(u32::MAX >> (planes::LANES - tile.rows) as u32).runtime();
        let shift = (lane / rows * rows) as u32;
        #[unroll]
        for i in 0..loads {
            let plane =
                unit / comptime!(planes::LANES) + comptime!(i * (tile.units() / planes::LANES));
            let at = plane * together + lane / rows;
            let votes = planes::votes(names_row(index, of_lane, first + at, sizes), true);
            if of_rows == 0 {
                words[at] = votes >> shift & own;
            }
        }
        sync_cube();
        #[unroll]
        for i in 0..loads {
            let word = words[comptime!(i * tile.lanes) + unit % lanes];
            is_row[i] = word >> (unit / lanes) as u32 & 1u32 != 0u32;
        }
        // Before the next ones are written.
        sync_cube();
    } else {
        #[unroll]
        for i in 0..loads {
            let number = first + comptime!(i * tile.lanes) + unit % lanes;
            is_row[i] = names_row(index, asked, number, sizes);
        }
    }
    // Where its votes are among the plane's.
    let shift = (unit % comptime!(planes::LANES) / lanes * lanes) as u32;
    let own = comptime!(u32::MAX >> (planes::LANES - tile.lanes) as u32).runtime();
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

/// Whether a number of a place names a row, if both are there.
#[cube]
fn names_row(index: &[i32], asked: usize, number: usize, sizes: &Sizes) -> bool {
    let at = asked.min(sizes.count - 1);
    asked < sizes.count && row_at(index, at, number, sizes) >= 0i32
}

/// Rows that a place names, of all lists'.
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
    let number = part * comptime!(NUMBERS);
    let list = at / sizes.places * sizes.rows;
    let one = bits.first();
    let rest = bits.rest();
    let are_two = !rest.is_empty();
    let other = select(are_two, rest.first(), one);
    let rest = rest.rest();
    bits.low = rest.low;
    bits.high = rest.high;
    // They were loaded for the votes, so they are near.
    Two {
        one: list + index[named(at, number + one, sizes)] as usize,
        other: list + index[named(at, number + other, sizes)] as usize,
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
