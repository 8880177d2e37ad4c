//! Plans with all blocks of a host layout, in which each entry has its own mask. The masks follow from a tensor on the device: positions of queries and
//! keys, or bits of pairs.
//!
//! Tiles, their order and their entries are those of the layout's plan, which is uploaded once. Each pattern, one per batch entry and head, has a copy of
//! them. Masks come after the full and the empty one: entry `e`, counted over all patterns, has mask `2 + e`. One launch makes the whole plan.

use cubecl::prelude::*;

use super::tables::{Heads, first_tile};
use super::words::{Cut, EMPTY, Extent, FULL, Places};
use blocksparse::plan::{MASKED_STEP, Mainloop};
use blocksparse::{BlockSource, PositionMask};

/// Units per cube, if the device has as many.
pub const UNITS: u32 = 128;

/// Source of the allowed pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Seen {
    /// A rule on the positions of query and key.
    ByPositions(PositionMask),
    /// Bits of a row, with 32 consecutive columns per word.
    ByBits,
}

impl Seen {
    /// Returns the source of the pairs of a choice, or `None` if it chooses blocks.
    pub fn by(choice: BlockSource) -> Option<Self> {
        match choice {
            BlockSource::Positions(rule) | BlockSource::OwnPositions(rule) => {
                Some(Self::ByPositions(rule))
            }
            BlockSource::Keys { .. } => Some(Self::ByBits),
            BlockSource::Mask | BlockSource::Indices { .. } | BlockSource::Scores(_) => None,
        }
    }
}

/// Offsets of the whole plan's sections, and of elements in the tensor.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Given {
    /// First tile record of each head.
    pub heads: usize,
    /// Tiles by decreasing work, with their records.
    pub order: usize,
    /// Tile records.
    pub tiles: usize,
    /// Entries.
    pub entries: usize,
    /// Masks.
    pub masks: usize,
    /// Last batch entry with heads of its own.
    pub last_entry: usize,
    /// Offset of the rows' elements in a pattern.
    pub rows: usize,
    /// Offset of the columns' elements, or the words per row for bits.
    pub cols: usize,
    /// Numbers per pattern.
    pub numbers: usize,
}

/// Whether the rule allows a pair.
#[cube]
fn sees(query: i32, key: i32, #[comptime] rule: PositionMask) -> bool {
    let both = query >= 0i32 && key >= 0i32;
    match comptime!(rule) {
        PositionMask::Before => both && key < query,
        PositionMask::UpTo => both && key <= query,
        PositionMask::Others => both && key != query,
    }
}

/// Returns which of the 32 columns from `first` on, of `end` columns, row `row` may attend to, one bit each.
#[cube]
fn by_positions(
    positions: &[i32],
    row: usize,
    first: usize,
    end: usize,
    #[comptime] cut: Cut,
    #[comptime] rule: PositionMask,
) -> u32 {
    let own = positions[row];
    let mut word = 0u32.runtime();
    // All positions are loaded before the first is compared.
    #[unroll]
    for bit in 0..comptime!(cut.group.min(32)) {
        let at = first + bit;
        let other = positions[at.min(end - 1)];
        let is_seen = match comptime!(cut.mainloop) {
            Mainloop::Rows => sees(own, other, rule),
            Mainloop::Columns => sees(other, own, rule),
        };
        word |= select(is_seen && at < end, comptime!(1u32 << bit), 0u32);
    }
    word
}

/// Returns the allowed pairs of row `row` of a pattern with the columns from `col` on, one bit each, for 32 columns or as many as an entry has.
#[cube]
fn seen_of(
    numbers: &[i32],
    pattern: usize,
    row: usize,
    col: usize,
    extent: &Extent,
    given: &Given,
    #[comptime] cut: Cut,
    #[comptime] seen: Seen,
) -> u32 {
    let first = pattern * given.numbers;
    match comptime!(seen) {
        Seen::ByPositions(rule) => {
            let cols = first + given.cols;
            let end = cols + extent.col_len as usize;
            by_positions(
                numbers,
                first + given.rows + row,
                cols + col,
                end,
                cut,
                rule,
            )
        }
        // An entry begins at a multiple of its columns.
        Seen::ByBits => {
            let word = numbers[first + row * given.cols + col / 32] as u32;
            word >> (col % 32) as u32
        }
    }
}

/// Makes the plan. A cube makes one tile, in the order of work: its records, its entries and their masks. All cubes together make the first tiles of heads,
/// and the first cube makes the full and the empty mask. `numbers` are `[patterns, numbers]`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn of_pairs(
    numbers: &[i32],
    whole: &[u32],
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    heads: Heads,
    given: Given,
    tiles: usize,
    #[comptime] cut: Cut,
    #[comptime] entry_words: usize,
    #[comptime] seen: Seen,
    #[comptime] units: usize,
) {
    let at = CUBE_POS;
    if at < tiles {
        let unit = UNIT_POS as usize;
        let of_mask = comptime!(cut.rows * cut.mask_words());
        let pattern = at / extent.tiles;
        let of_entry = heads.patterns;
        let entry = (pattern / of_entry).min(given.last_entry);
        let group = heads.per_batch / of_entry;
        let head = entry * heads.per_batch + pattern % of_entry * group;
        let first_record = whole[given.heads + head] as usize;
        let ranked = given.order + (first_record + at % extent.tiles) * 4;
        let tile = whole[ranked] as usize;
        let first = whole[ranked + 1] as usize;
        let steps = whole[ranked + 2];
        // Entries of a pattern are consecutive, from those of its first tile on.
        let base = whole[given.tiles + first_record * 3] as usize;
        let into = pattern * extent.room + first - base;
        if unit == 0 {
            let order = places.order + at * 4;
            let record = places.tiles + (pattern * extent.tiles + tile) * 3;
            plan[order] = tile as u32;
            plan[order + 1] = into as u32;
            plan[order + 2] = steps;
            plan[order + 3] = steps;
            plan[record] = into as u32;
            plan[record + 1] = steps;
            plan[record + 2] = steps;
        }
        let own_head = at * comptime!(units) + unit;
        if own_head < heads.all {
            plan[places.heads + own_head] = first_tile(own_head, &extent, &heads);
        }
        if at == 0 {
            let mut word = unit;
            while word < comptime!(2 * of_mask) {
                let fixed = select(
                    word / of_mask == comptime!(FULL as usize),
                    comptime!(u32::MAX >> (32 - cut.group.min(32))),
                    0u32,
                );
                plan[places.masks + word] = fixed;
                word += comptime!(units);
            }
        }
        let entries = steps as usize * comptime!(cut.per_step);
        let mut i = unit;
        while i < entries {
            let from = given.entries + (first + i) * comptime!(entry_words);
            let to = places.entries + (into + i) * comptime!(entry_words);
            let is_empty = whole[from + 1] == EMPTY;
            plan[to] = whole[from];
            plan[to + 1] = select(is_empty, EMPTY, (into + i + 2) as u32);
            // The entry's visits. The masks of every step must be applied.
            if comptime!(entry_words == 3) {
                let step = i / comptime!(cut.per_step);
                let begins = i == step * comptime!(cut.per_step);
                plan[to + 2] = whole[from + 2] | select(begins, MASKED_STEP, 0u32);
            }
            i += comptime!(units);
        }
        let mut i = unit;
        while i < entries * of_mask {
            let from = given.entries + (first + i / of_mask) * comptime!(entry_words);
            let id = whole[from + 1];
            if id != EMPTY {
                let word = i % of_mask;
                let row = tile * comptime!(cut.rows) + word / comptime!(cut.mask_words());
                let col = whole[from] as usize * comptime!(cut.group)
                    + word % comptime!(cut.mask_words()) * 32;
                let mut bits = whole[given.masks + id as usize * of_mask + word];
                if (row as i32) < extent.row_len {
                    if bits != 0u32 {
                        bits &= seen_of(numbers, pattern, row, col, &extent, &given, cut, seen);
                    }
                } else {
                    bits = 0u32;
                }
                plan[places.masks + (into + 2) * of_mask + i] = bits;
            }
            i += comptime!(units);
        }
    }
}
