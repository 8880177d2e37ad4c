//! Radix select: the largest keys of a row, digit by digit from the most significant.
//!
//! ```text
//! for each of three digits of at most 11 bits:
//!     count the values of the digit, over keys that match all digits found so far          in shared memory
//!     find the highest value such that enough keys have it or a higher one
//!     stop if all keys that match are selected
//! select the keys above the digits found, and the first of the keys that match them
//! ```
//!
//! Nothing is sorted. If a cube has a whole row (`list_top_k`), its units read the row's elements coalesced: most long rows twice for digits and once for
//! the list. If a cube has a part of a row, each digit takes a launch, with `count_digits` and `find_digit`. Counts are integers, so the order of the
//! atomic additions does not change them.

// Slices in kernels do not have the methods that Clippy suggests.
#![allow(clippy::needless_range_loop)]

use cubecl::ir::features::AtomicUsage;
use cubecl::ir::{ElemType, Type, UIntKind};
use cubecl::prelude::*;

use crate::arch::planes;
use crate::error::KernelError;
use crate::limits::{self, most_units};
use crate::shared::bins::Bins;
use crate::shared::unit_sums::{UnitSums, before_and_all};

/// Smallest and largest number of units per cube.
const UNITS: [usize; 2] = [128, 512];
/// Elements per unit, as long as that keeps the number of units in this range.
const UNIT_NUMBERS: usize = 16;
/// Bits per digit. The last digit has the remaining bits of 32.
const BITS: u32 = 11;
/// Values of a digit.
pub const BINS: usize = 1 << BITS;
/// Digits of a key.
pub const DIGITS: u32 = 32u32.div_ceil(BITS);
/// Vectors that a unit loads at once to count digits.
const AHEAD: usize = 4;
/// Consecutive vectors that a unit lists at once.
const RUN: usize = 2;
/// Bit at which the count of equal keys begins in a word. The lower bits count the keys above. A cube's elements fit either count.
const HALF: u32 = 16;
/// Words of a found digit: its value, the number of keys above it, and the number of keys equal to it.
pub const FOUND: usize = 3;

/// Number of bits below a digit.
pub fn shift_of(level: u32) -> u32 {
    32u32.saturating_sub(BITS * (level + 1))
}

/// Mask of a digit's bits, shifted down to bit 0.
pub fn mask_of(level: u32) -> u32 {
    (1u32 << BITS.min(32 - BITS * level)) - 1
}

/// Returns the largest vector width for rows of `columns` elements in a buffer that begins at `offset` bytes.
pub fn vector_of(client: &Client, columns: usize, offset: Option<u64>) -> usize {
    let begins = offset.unwrap_or(0) as usize / size_of::<f32>();
    limits::vector_of(client.properties(), size_of::<f32>(), &[columns, begins])
}

/// Parameters of a cube's search, compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RadixTile {
    /// Units per cube, a power of two that divides [`BINS`].
    pub units: usize,
    /// Method of adding up the units' counts.
    pub sums: UnitSums,
    /// Whether units count with PTX.
    pub ptx: bool,
}

impl RadixTile {
    /// Returns the tile for rows, or parts of rows, of `columns` elements.
    ///
    /// # Errors
    /// [`KernelError`] if the device's cubes are too small, or it lacks atomic additions.
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

    /// Values of a digit per unit.
    pub fn own_bins(&self) -> usize {
        BINS / self.units
    }
}

/// Conversion of a row's elements to keys.
#[cube]
pub trait RowKeys: CubeType {
    /// Loads neighbouring elements of the row.
    fn load<N: Size>(&self, numbers: &[Vector<u32, N>], vector: usize) -> Vector<u32, N>;

    /// Returns the key of the element at index `at`, ordered as the selection and above 0.
    fn key(&self, number: u32, at: usize) -> u32;
}

/// Elements of a row that a cube reads: from `begin`, a multiple of the vector width, up to `end`.
#[derive(CubeType, Clone, Copy)]
pub struct Span {
    /// First element.
    pub begin: usize,
    /// End, exclusive.
    pub end: usize,
}

/// State of the search for the last selected key.
#[derive(CubeType, Clone, Copy)]
pub struct Threshold {
    /// The digits found so far.
    pub digits: u32,
    /// Mask of their bits.
    pub known: u32,
    /// Number of keys still to select among those with these digits.
    pub left: u32,
    /// Whether all keys with these digits are selected.
    pub is_done: bool,
}

#[cube]
impl Threshold {
    /// Begins the search for `wanted` of `all` keys.
    pub fn new(wanted: u32, all: usize) -> Threshold {
        Threshold {
            digits: 0u32.runtime(),
            known: 0u32.runtime(),
            left: wanted,
            // With no keys wanted, or all, there is no digit to find.
            is_done: wanted == 0u32 || all <= wanted as usize,
        }
    }

    /// Adds a digit, with the numbers of keys above it and equal to it.
    pub fn take(&mut self, digit: u32, above: u32, count: u32, #[comptime] level: u32) {
        if !self.is_done {
            self.digits |= digit << comptime!(shift_of(level));
            self.known |= comptime!(mask_of(level) << shift_of(level));
            self.left -= above;
            self.is_done = count == self.left;
        }
    }
}

/// Counts in `bins` the digits of a level, over the keys that match all digits found before. Every unit of the cube must call it.
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

/// Finds the digit of the last selected key. `counts` has the unit's counts of digit values, its highest value first; values descend over the units too.
/// Finds nothing if `is_done`.
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

/// Lists the columns of the `wanted` largest keys in the cube's span of a row, like `list_selected`.
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

/// Returns the threshold of the `wanted` largest keys in the cube's span of a row. `partial` has [`UnitSums::partial`] words, `found` [`FOUND`].
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
        // From the highest digit value down.
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

/// Destination of a span's selected columns.
#[derive(CubeType, Clone, Copy)]
pub struct ListPlace {
    /// Start of the row's list, in blocks.
    pub into: usize,
    /// Keys above the threshold in the row before the span.
    pub above: u32,
    /// Keys equal to the threshold in the row before the span.
    pub equal: u32,
    /// Elements to loop over. On a device without planes it must be the same for all cubes, because of barriers.
    pub looked: usize,
    /// Start of the row's places, if they are written.
    pub row_places: usize,
    /// Offset added to each place.
    pub first_place: usize,
}

#[cube]
impl ListPlace {
    /// Lists a whole row, without places.
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

/// Lists the selected columns of a span in ascending order, tile by tile. Each column becomes `block` consecutive entries. If there are `places`, each
/// column's place in the list is written to them, or −1.
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
        // One bit per element.
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
        // A tile without selected columns has nothing to list, but all columns need places.
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
