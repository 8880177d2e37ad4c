//! The highest keys of a row, digit by digit from the highest on (radix select).
//!
//! ```text
//! for each of three digits of 11 bits
//!     counts of the digits of the keys that have all digits found so far          in shared memory
//!     the digit: the highest that, with those above it, enough keys have
//!     end if all keys that have it are selected
//! selected: keys that are above in the digits that were found, and the first of those that are equal in them
//! ```
//!
//! Nothing is sorted. A cube has a row (`list_top_k`), whose numbers its units read next to each other: most long rows twice for digits and once for the
//! list. Or a cube has a part of a row, and a launch finds a digit, by `count_digits` and `find_digit`. Counts are whole numbers that units add to in any
//! order, so they are the same every time.

// A kernel's numbers have no such methods.
#![allow(clippy::needless_range_loop)]

use cubecl::ir::features::AtomicUsage;
use cubecl::ir::{ElemType, Type, UIntKind};
use cubecl::prelude::*;

use crate::arch::planes;
use crate::error::KernelError;
use crate::limits::{self, most_units};
use crate::shared::bins::Bins;
use crate::shared::unit_sums::{UnitSums, before_and_all};

/// Units of a cube, at least and at most.
const UNITS: [usize; 2] = [128, 512];
/// Numbers of a unit where units are between these.
const UNIT_NUMBERS: usize = 16;
/// Bits of a digit, of which the last has what is left of 32.
const BITS: u32 = 11;
/// Values of a digit.
pub const BINS: usize = 1 << BITS;
/// Digits of a key.
pub const DIGITS: u32 = 32u32.div_ceil(BITS);
/// Vectors that a unit loads at once where digits are counted.
const AHEAD: usize = 4;
/// Neighbouring vectors that a unit lists at once.
const RUN: usize = 2;
/// Where a count of equal keys begins in a word, below which there is one of keys above: neither is as many as a cube's numbers.
const HALF: u32 = 16;
/// Words of a digit that was found: itself, how many keys are above it, and how many have it.
pub const FOUND: usize = 3;

/// Bits below a digit.
pub fn shift_of(level: u32) -> u32 {
    32u32.saturating_sub(BITS * (level + 1))
}

/// The bits of a digit, as the lowest.
pub fn mask_of(level: u32) -> u32 {
    (1u32 << BITS.min(32 - BITS * level)) - 1
}

/// The most numbers that a load takes, of rows of so many that begin at so many bytes.
pub fn vector_of(client: &Client, columns: usize, offset: Option<u64>) -> usize {
    let begins = offset.unwrap_or(0) as usize / size_of::<f32>();
    limits::vector_of(client.properties(), size_of::<f32>(), &[columns, begins])
}

/// How a cube searches. Compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RadixTile {
    /// Units of a cube, a power of two that divides [`BINS`].
    pub units: usize,
    /// How they add up what each has.
    pub sums: UnitSums,
    /// Whether units count by PTX.
    pub ptx: bool,
}

impl RadixTile {
    /// Of rows, or parts of them, of so many numbers.
    ///
    /// # Errors
    /// [`KernelError`] if the device's cubes are too small, or their units cannot count together.
    pub fn new(client: &Client, columns: usize) -> Result<Self, KernelError> {
        let properties = client.properties();
        let counts = Type::atomic(ElemType::UInt(UIntKind::U32));
        let usage = properties.atomic_type_usage(counts);
        if !(usage.contains(AtomicUsage::Add) && usage.contains(AtomicUsage::LoadStore)) {
            let dtype = "whole numbers that units of a cube add to".into();
            return Err(KernelError::Dtype { dtype });
        }
        let hardware = &properties.hardware;
        let most = most_units(properties);
        let [low, high] = UNITS;
        KernelError::check("units of a cube that selects", most as u32, low)?;
        let units = columns.div_ceil(UNIT_NUMBERS).next_power_of_two();
        let units = units.clamp(low, high.min(1 << most.ilog2()));
        let tile = Self {
            units,
            sums: UnitSums::new(properties, units),
            ptx: planes::have_ptx(properties),
        };
        let bytes = size_of::<u32>() * (BINS + 4 + FOUND + tile.sums.partial());
        let available = hardware.max_shared_memory_size as u32;
        KernelError::check("bytes of shared memory", available, bytes)?;
        Ok(tile)
    }

    /// Values of a digit that a unit has.
    pub fn own_bins(&self) -> usize {
        BINS / self.units
    }
}

/// How the elements of a row become keys.
#[cube]
pub trait RowKeys: CubeType {
    /// Neighbouring elements of the row.
    fn load<N: Size>(&self, numbers: &[Vector<u32, N>], vector: usize) -> Vector<u32, N>;

    /// The key of the number at a place, in the order of selection and above 0.
    fn key(&self, number: u32, at: usize) -> u32;
}

/// Elements of a row that a cube looks at: from `begin`, with which a vector begins, up to `end`.
#[derive(CubeType, Clone, Copy)]
pub struct Span {
    /// The first.
    pub begin: usize,
    /// Behind the last.
    pub end: usize,
}

/// What is known of the last key that is selected.
#[derive(CubeType, Clone, Copy)]
pub struct Threshold {
    /// Its digits,
    pub digits: u32,
    /// and which bits they are.
    pub known: u32,
    /// How many of the keys that have these digits are selected,
    pub left: u32,
    /// and whether all are.
    pub is_done: bool,
}

#[cube]
impl Threshold {
    /// Of `wanted` of so many keys.
    pub fn new(wanted: u32, all: usize) -> Threshold {
        Threshold {
            digits: 0u32.runtime(),
            known: 0u32.runtime(),
            left: wanted,
            // Of none there is no digit to find.
            is_done: wanted == 0u32 || all <= wanted as usize,
        }
    }

    /// Takes a digit, of which so many keys are above and so many equal.
    pub fn take(&mut self, digit: u32, above: u32, count: u32, #[comptime] level: u32) {
        if !self.is_done {
            self.digits |= digit << comptime!(shift_of(level));
            self.known |= comptime!(mask_of(level) << shift_of(level));
            self.left -= above;
            self.is_done = count == self.left;
        }
    }
}

/// Counts in `bins` the digits of a level, of the keys that have all digits before. Every unit of the cube gets here.
#[cube]
pub fn count_digits<N: Size, K: RowKeys>(
    numbers: &[Vector<u32, N>],
    keys: &K,
    span: &Span,
    threshold: &Threshold,
    bins: &Bins,
    #[comptime] level: u32,
    #[comptime] t: RadixTile,
) {
    let width = N::value();
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!(t.own_bins()) {
        bins.clear(unit + comptime!(i * t.units), t.ptx);
    }
    sync_cube();
    let last_vector = max(span.end.div_ceil(width), 1usize) - 1;
    let first = span.begin / width;
    let end = select(threshold.is_done, first, span.end.div_ceil(width));
    let mut at = first + unit;
    while at < end {
        let mut loaded = Array::<Vector<u32, N>>::new(comptime!(AHEAD));
        #[unroll]
        for i in 0..comptime!(AHEAD) {
            loaded[i] = keys.load::<N>(numbers, (at + comptime!(i * t.units)).min(last_vector));
        }
        #[unroll]
        for i in 0..comptime!(AHEAD) {
            #[unroll]
            for j in 0..width {
                let own = (at + comptime!(i * t.units)) * width + j;
                let key = keys.key(loaded[i].extract(j), own);
                if own < span.end && (key & threshold.known) == threshold.digits {
                    let digit = (key >> comptime!(shift_of(level))) & comptime!(mask_of(level));
                    bins.count(digit as usize, t.ptx);
                }
            }
        }
        at += comptime!(AHEAD * t.units);
    }
    sync_cube();
}

/// Finds the digit with which so many keys are left, from the highest down, of what all units have of their digits' counts: from the unit's highest digit
/// down. Nothing is found if all `is_done`.
#[cube]
pub fn find_digit(
    counts: &Array<u32>,
    threshold: &Threshold,
    found: &mut [u32],
    partial: &mut [u32],
    step: usize,
    #[comptime] t: RadixTile,
) {
    let left = threshold.left;
    let top = comptime!(BINS - 1) - UNIT_POS as usize * comptime!(t.own_bins());
    let mut own = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(t.own_bins()) {
        own += counts[i];
    }
    let (before, _) = before_and_all(own, partial, step, t.sums);
    if !threshold.is_done && before < left && before + own >= left {
        let mut above = before;
        #[unroll]
        for i in 0..comptime!(t.own_bins()) {
            let count = counts[i];
            if above < left && above + count >= left {
                found[0] = (top - i) as u32;
                found[1] = above;
                found[2] = count;
            }
            above += count;
        }
    }
    sync_cube();
}

/// Lists the columns of the `wanted` highest keys of the span of a row that a cube has, as `list_selected` does.
#[cube]
pub fn list_top_k<N: Size, K: RowKeys>(
    numbers: &[Vector<u32, N>],
    keys: &K,
    span: &Span,
    wanted: u32,
    lists: &mut [i32],
    places: &mut ComptimeOption<Box<[i32]>>,
    place: &ListPlace,
    #[comptime] block: usize,
    #[comptime] t: RadixTile,
) {
    let mut partial = Shared::<[u32]>::new_slice(comptime!(t.sums.partial()));
    let mut found = Shared::<[u32]>::new_slice(comptime!(FOUND));
    let threshold = select_row::<N, K>(numbers, keys, span, wanted, &mut partial, &mut found, t);
    list_selected::<N, K>(
        numbers,
        keys,
        span,
        &threshold,
        lists,
        places,
        place,
        &mut partial,
        block,
        t,
    );
}

/// The threshold of a row that a cube has, above which and among whose equals are the `wanted` highest keys of the span. `partial` has
/// [`UnitSums::partial`] words, `found` [`FOUND`].
#[cube]
fn select_row<N: Size, K: RowKeys>(
    numbers: &[Vector<u32, N>],
    keys: &K,
    span: &Span,
    wanted: u32,
    partial: &mut [u32],
    found: &mut [u32],
    #[comptime] t: RadixTile,
) -> Threshold {
    let bins = Bins::new(BINS, t.ptx);
    let mut threshold = Threshold::new(wanted, span.end - span.begin);
    #[unroll]
    for level in 0..comptime!(DIGITS) {
        count_digits::<N, K>(numbers, keys, span, &threshold, &bins, level, t);
        // From the highest digit down.
        let top = comptime!(BINS - 1) - UNIT_POS as usize * comptime!(t.own_bins());
        let mut counts = Array::<u32>::new(comptime!(t.own_bins()));
        #[unroll]
        for i in 0..comptime!(t.own_bins()) {
            counts[i] = bins.get(top - i, t.ptx);
        }
        let step = comptime!(level as usize).runtime();
        find_digit(&counts, &threshold, found, partial, step, t);
        threshold.take(found[0], found[1], found[2], level);
    }
    threshold
}

/// Where a span's selected columns go.
#[derive(CubeType, Clone, Copy)]
pub struct ListPlace {
    /// Where the row's list begins, in blocks.
    pub into: usize,
    /// Keys of the row before the span that are above,
    pub above: u32,
    /// and that are equal.
    pub equal: u32,
    /// Numbers that are looked at: as many for all cubes on a device without planes, where barriers ask for it.
    pub looked: usize,
    /// Where the row's places begin, if they are written,
    pub row_places: usize,
    /// and what is added to each.
    pub first_place: usize,
}

#[cube]
impl ListPlace {
    /// Of all of a row, without places.
    pub fn new(into: usize, looked: usize) -> ListPlace {
        ListPlace {
            into,
            above: 0u32.runtime(),
            equal: 0u32.runtime(),
            looked,
            row_places: 0usize.runtime(),
            first_place: 0usize.runtime(),
        }
    }
}

/// Lists the columns of a span that are selected, ascending, in tiles of neighbours: as `block` entries each, of which a column has so many. `places`, if there
/// are any, say of each column where in the list it stands, or −1.
#[cube]
pub fn list_selected<N: Size, K: RowKeys>(
    numbers: &[Vector<u32, N>],
    keys: &K,
    span: &Span,
    threshold: &Threshold,
    lists: &mut [i32],
    places: &mut ComptimeOption<Box<[i32]>>,
    place: &ListPlace,
    partial: &mut [u32],
    #[comptime] block: usize,
    #[comptime] t: RadixTile,
) {
    let units = comptime!(t.units);
    let width = N::value();
    let unit = UNIT_POS as usize;
    let own_numbers = width * comptime!(RUN);
    let tiles = place.looked.div_ceil(own_numbers * units);
    let last_vector = max(span.end.div_ceil(width), 1usize) - 1;
    let first_vector = span.begin / width;
    let mut above_tile = place.above;
    let mut equal_tile = place.equal;
    let mut next = Array::<Vector<u32, N>>::new(comptime!(RUN));
    #[unroll]
    for i in 0..comptime!(RUN) {
        let vector = first_vector + unit * comptime!(RUN) + i;
        next[i] = keys.load::<N>(numbers, vector.min(last_vector));
    }
    for tile in 0..tiles {
        let first = first_vector + (tile * units + unit) * comptime!(RUN);
        let mut loaded = Array::<Vector<u32, N>>::new(comptime!(RUN));
        #[unroll]
        for i in 0..comptime!(RUN) {
            loaded[i] = next[i];
            let vector = first + comptime!(units * RUN) + i;
            next[i] = keys.load::<N>(numbers, vector.min(last_vector));
        }
        // Two bits a number.
        let mut is_above = 0u32.runtime();
        let mut is_equal = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(RUN) {
            #[unroll]
            for j in 0..width {
                let at = (first + i) * width + j;
                let key = keys.key(loaded[i].extract(j), at) & threshold.known;
                let bit = comptime!(1u32 << (i * width + j));
                is_above |= select(at < span.end && key > threshold.digits, bit, 0u32);
                is_equal |= select(at < span.end && key == threshold.digits, bit, 0u32);
            }
        }
        let count = is_above.count_ones() | (is_equal.count_ones() << comptime!(HALF));
        let (before, all) = before_and_all(count, partial, tile, t.sums);
        let mut above = above_tile + (before & comptime!((1u32 << HALF) - 1));
        let mut equal = equal_tile + (before >> comptime!(HALF));
        // Of a tile without any there is nothing to list, but places are of all.
        let mut is_visited = count != 0u32;
        if comptime!(places.is_some()) {
            is_visited = true.runtime();
        }
        if is_visited {
            #[unroll]
            for i in 0..comptime!(RUN) {
                #[unroll]
                for j in 0..width {
                    let at = (first + i) * width + j;
                    let bit = comptime!((i * width + j) as u32);
                    let above_too = (is_above >> bit) & 1u32;
                    let equal_too = (is_equal >> bit) & 1u32;
                    let is_selected =
                        above_too == 1u32 || (equal_too == 1u32 && equal < threshold.left);
                    let rank = (above + min(equal, threshold.left)) as usize;
                    if is_selected {
                        #[unroll]
                        for entry in 0..block {
                            let into = (place.into + rank) * block + entry;
                            lists[into] = (at * block + entry) as i32;
                        }
                    }
                    #[comptime]
                    match places {
                        ComptimeOption::Some(places) => {
                            if at < span.end {
                                let own = (place.first_place + rank) as i32;
                                places[place.row_places + at] = select(is_selected, own, -1i32);
                            }
                        }
                        ComptimeOption::None => {}
                    }
                    above += above_too;
                    equal += equal_too;
                }
            }
        }
        above_tile += all & comptime!((1u32 << HALF) - 1);
        equal_tile += all >> comptime!(HALF);
    }
}
