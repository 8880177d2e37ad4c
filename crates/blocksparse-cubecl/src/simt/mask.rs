//! Masks of a step's pairs, and locations of stored weights.

use cubecl::prelude::*;

use super::tile::*;
use crate::shared::addressing::*;

/// Returns the mask bits of a unit's pairs: row `i` and column `j` at bit `4i + j`. All bits are set if a step has no mask.
#[cube]
pub fn mask_bits(
    schedule: &Schedule,
    entry: usize,
    masked: bool,
    unit: &Unit,
    #[comptime] t: Tile,
) -> u32 {
    let group = comptime!(t.group);
    let rows = comptime!(t.unit_rows);
    let mut bits = 0xffff_ffffu32;
    if masked {
        let col = unit.x * 4;
        let mask =
            schedule.plan.words[entry + col / group * comptime!(t.entry_words()) + 1] as usize;
        let within = col % group;
        let word = schedule.parts.masks
            + (mask * comptime!(t.rows) + unit.y * rows) * comptime!(t.mask_words)
            + within / 32;
        bits = 0u32;
        #[unroll]
        for i in 0..rows {
            let row =
                schedule.plan.words[word + comptime!(i * t.mask_words)] >> (within % 32) as u32;
            bits |= (row & 15u32) << comptime!(4 * i as u32);
        }
    }
    bits
}

/// Returns which halves of a step's columns have any allowed pair in the rows of the unit's plane, as two bits. On a diagonal, half the planes have none.
/// Without planes, both are needed, since a step has barriers that all units must reach.
#[cube]
#[allow(clippy::collapsible_if)] // Compile-time conditions stay separate from run-time ones.
pub fn needed(bits: u32, masked: bool, unit_x: usize, #[comptime] t: Tile) -> u32 {
    let mut halves = 3u32;
    if comptime!(t.has_halves()) {
        if masked {
            let any = bits != 0u32;
            let right = unit_x >= comptime!(t.units_x / 2);
            let left = u32::cast_from(plane_any(any && !right));
            let right = u32::cast_from(plane_any(any && right));
            halves = left + right * 2u32;
        }
    }
    halves
}

/// Location of four stored weights.
#[derive(CubeType, Clone, Copy)]
pub struct WeightPlace {
    /// Whether the entry is a block, and not padding of the step.
    pub kept: bool,
    /// Index of the first of the four elements.
    pub element: usize,
}

/// Returns the location of the stored weights of row `row` and the unit's four columns. In a loop over rows, the columns are keys, one element apart. In a
/// loop over columns, they are queries, `b` elements apart.
#[cube]
pub fn weight_place(
    plan: &PlanWords,
    place0: usize,
    entry: usize,
    row: usize,
    unit_x: usize,
    #[comptime] t: Tile,
) -> WeightPlace {
    let b = comptime!(t.store.unwrap());
    let group = comptime!(t.group);
    let col = unit_x * 4;
    let word = entry + col / group * 3;
    let block = place0 + plan.words[word + 2] as usize;
    let row = row % b;
    let col = plan.words[word] as usize * group % b + col % group;
    let mut element = (block * b + row) * b + col;
    if comptime!(t.columns()) {
        element = (block * b + col) * b + row;
    }
    WeightPlace {
        kept: plan.words[word + 1] != 1u32,
        element,
    }
}
