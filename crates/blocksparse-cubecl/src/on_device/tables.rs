//! Lookup tables of a plan's tiles: the masks, and the first tile of each head.

use cubecl::prelude::*;

use super::words::{Cut, EMPTY, Extent, FULL, Places};
use blocksparse::plan::Mainloop;

/// Assignment of patterns to heads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Heads {
    /// Heads of all batch entries with heads of their own.
    pub all: usize,
    /// Heads per batch entry.
    pub per_batch: usize,
    /// Patterns per batch entry, a divisor of its heads. Consecutive heads share a pattern.
    pub patterns: usize,
}

/// Makes the words of the masks, and after them the words of the heads.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn tables(
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    heads: Heads,
    #[comptime] cut: Cut,
) {
    table_word(plan, ABSOLUTE_POS, &extent, &places, &heads, cut);
}

/// Makes word `at` of the masks followed by the heads. Masks 0 and 1 are full and empty; the id of any other is that of [`mask_id`].
#[cube]
pub fn table_word(
    plan: &mut [u32],
    at: usize,
    extent: &Extent,
    places: &Places,
    heads: &Heads,
    #[comptime] cut: Cut,
) {
    let row_words = comptime!(cut.mask_words());
    let mask_words = comptime!(cut.masks() * cut.rows * cut.mask_words());
    if at < mask_words {
        let id = (at / comptime!(cut.rows * row_words)) as u32;
        let row = at / row_words % comptime!(cut.rows);
        let first = at % row_words * 32;
        plan[places.masks + at] = mask_word(id, row, first as i32, extent, cut);
    } else if at < mask_words + heads.all {
        let head = at - mask_words;
        plan[places.heads + head] = first_tile(head, extent, heads);
    }
}

/// Returns the first tile record of a head, counted over all batch entries.
#[cube]
pub fn first_tile(head: usize, extent: &Extent, heads: &Heads) -> u32 {
    let shared_by = heads.per_batch / heads.patterns;
    let pattern = head / heads.per_batch * heads.patterns + head % heads.per_batch / shared_by;
    (pattern * extent.tiles) as u32
}

/// Returns a word of mask `id`: the allowed columns from `first` on in row `row` of an entry. They are consecutive, so two numbers determine them.
#[cube]
#[allow(clippy::collapsible_if)] // Compile-time conditions stay separate from run-time ones.
fn mask_word(id: u32, row: usize, first: i32, extent: &Extent, #[comptime] cut: Cut) -> u32 {
    let crossings = comptime!(cut.crossings() as u32);
    let group = comptime!(cut.group as i32).runtime();
    let is_full = id == FULL;
    let code = id.max(2u32) - 2u32;
    let col_end = code % 2u32 == 1u32 && !is_full;
    let row_end = code / 2u32 % 2u32 == 1u32;
    let crossing = code / 4u32 % (crossings + 1u32);
    let subset = code / 4u32 / (crossings + 1u32);
    let block_row = (row / comptime!(cut.block)) as u32;
    // Last row of the last tile, and last column of the last entry.
    let last_row = (extent.row_len - 1i32) % comptime!(cut.rows as i32);
    let last_col = (extent.col_len - 1i32) % group;
    let is_row = (subset >> block_row) & 1u32 == 1u32 && (!row_end || row as i32 <= last_row);
    let mut from = 0i32.runtime();
    let mut to = select(col_end, last_col + 1i32, group);
    if comptime!(cut.causal) {
        if crossing < crossings && !is_full {
            let step = comptime!(cut.distance_step() as i32);
            // Remainder of the offset, also if it is negative.
            let rest = (extent.offset % step + step) % step;
            let distance = crossing as i32 * step + rest - comptime!(cut.below() as i32);
            match comptime!(cut.mainloop) {
                Mainloop::Rows => to = to.min(row as i32 + distance + 1i32),
                Mainloop::Columns => from = row as i32 - distance,
            };
        }
    }
    let word = bits_below(to - first) & !bits_below(from - first);
    select(id != EMPTY && (is_full || is_row), word, 0u32)
}

/// Returns a word with its lowest `count` bits set: none if `count` is below 1, all if it exceeds the word.
#[cube]
fn bits_below(count: i32) -> u32 {
    let within = count.clamp(0i32, 31i32) as u32;
    select(count >= 32i32, 0xffff_ffffu32, (1u32 << within) - 1u32)
}
