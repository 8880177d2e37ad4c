//! What a plan's tiles look things up in: the masks, and the first tile of each head.

use cubecl::prelude::*;

use super::words::{Cut, EMPTY, Extent, FULL, Places};
use crate::plan::Walk;

/// Which tiles a head has.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Heads {
    /// Heads of all batch entries with heads of their own.
    pub all: usize,
    /// Heads of a batch entry.
    pub per_batch: usize,
    /// Patterns of a batch entry, a divisor of its heads: as many neighbouring heads share one.
    pub patterns: usize,
}

/// The masks' words, and behind them the heads'.
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

/// Word `at` of the masks, and behind them of the heads. Masks 0 and 1 are full and empty; the id of any other is that of [`mask_id`].
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
        let mut word = 0u32;
        for bit in 0..32usize {
            let col = first + bit;
            if col < comptime!(cut.group) && allowed(id, row, col, extent, cut) {
                word |= 1u32 << bit as u32;
            }
        }
        plan[places.masks + at] = word;
    } else if at < mask_words + heads.all {
        let head = at - mask_words;
        plan[places.heads + head] = first_tile(head, extent, heads);
    }
}

/// The first tile record of a head, of all batch entries' heads.
#[cube]
pub fn first_tile(head: usize, extent: &Extent, heads: &Heads) -> u32 {
    let shared_by = heads.per_batch / heads.patterns;
    let pattern = head / heads.per_batch * heads.patterns + head % heads.per_batch / shared_by;
    (pattern * extent.tiles) as u32
}

/// Whether row `row` and column `col` of an entry are a pair under the mask `id`.
#[cube]
#[allow(clippy::collapsible_if)] // What is known at compile time stays apart from what is not.
fn allowed(id: u32, row: usize, col: usize, extent: &Extent, #[comptime] cut: Cut) -> bool {
    let crossings = comptime!(cut.crossings() as u32);
    let code = id.max(2u32) - 2u32;
    let col_end = code % 2u32 == 1u32;
    let row_end = code / 2u32 % 2u32 == 1u32;
    let crossing = code / 4u32 % (crossings + 1u32);
    let subset = code / 4u32 / (crossings + 1u32);
    let block_row = (row / comptime!(cut.block)) as u32;
    let mut result = (subset >> block_row) & 1u32 == 1u32;
    // The rows of the last tile, the columns of the last entry.
    if row_end {
        result =
            result && (row as i32) < (extent.row_len - 1i32) % comptime!(cut.rows as i32) + 1i32;
    }
    if col_end {
        result =
            result && (col as i32) < (extent.col_len - 1i32) % comptime!(cut.group as i32) + 1i32;
    }
    if comptime!(cut.causal) {
        if crossing < crossings {
            let step = comptime!(cut.distance_step() as i32);
            // The offset's remainder, of a negative offset, too.
            let rest = (extent.offset % step + step) % step;
            let distance = crossing as i32 * step + rest - comptime!(cut.below() as i32);
            let mut behind = col as i32 - row as i32;
            if comptime!(matches!(cut.walk, Walk::Columns)) {
                behind = row as i32 - col as i32;
            }
            result = result && behind <= distance;
        }
    }
    if id == FULL {
        result = true;
    }
    if id == EMPTY {
        result = false;
    }
    result
}
