//! A row of scores, and the search for the bound above which there are enough blocks, or enough weight.

use cubecl::prelude::*;

use super::bits::{Grid, HIDDEN, first_position, last_position, seen};
use super::budget_tile::{BudgetTile, RuleScalars};
use crate::arch::planes::{LANES, highest, lowest, total, traded};
use crate::shared::order_key::{INFINITE, key, number};
use crate::shared::row_tile::{Combine, across_lanes, combine, pair_across_lanes};
use blocksparse::EstimateKind;
use blocksparse::internal::LARGEST;

/// A row of scores.
#[derive(CubeType, Clone, Copy)]
pub struct Row {
    /// Index of its first score.
    pub start: usize,
    /// Its query block.
    pub q_block: usize,
    /// Largest visible score.
    pub largest: f32,
    /// Number of blocks that a rule may choose.
    pub others: u32,
    pub grid: Grid,
    pub rule: RuleScalars,
}

/// A block of a row.
#[derive(CubeType, Clone, Copy)]
pub struct Block {
    pub key: u32,
    /// Whether it can be chosen.
    pub is_seen: bool,
    /// Whether it is chosen whatever its score.
    pub is_forced: bool,
}

#[cube]
impl Block {
    /// Returns its key if a rule may choose it. Otherwise, if it is forced or not visible, 0, which is no score's key.
    pub fn free_key(&self) -> u32 {
        select(self.is_seen && !self.is_forced, self.key, 0u32)
    }
}

/// Returns a block of a row. Without branches, because all units of a plane vote afterwards.
#[cube]
pub fn block_at(scores: &[u32], block: usize, row: &Row, #[comptime] c: BudgetTile) -> Block {
    let grid = &row.grid;
    let score = scores[row.start + block.min(grid.kv_blocks - 1)];
    let mut is_seen = seen(row.q_block, block, grid, c.causal);
    if comptime!(c.hides) {
        is_seen = is_seen && score != HIDDEN;
    }
    let start = (block * grid.block) as i32;
    let near = start <= last_position(row.q_block, grid)
        && first_position(row.q_block, grid) - start < (row.rule.local * grid.block) as i32;
    Block {
        key: key(score),
        is_seen,
        is_forced: is_seen && (block < row.rule.first || (row.rule.local != 0 && near)),
    }
}

/// Returns the score for a block's weight, given its key.
#[cube]
pub fn value(key: u32, #[comptime] kind: EstimateKind) -> f32 {
    let least = comptime!(match kind {
        EstimateKind::Probability => 0.0f32,
        EstimateKind::Logit => -LARGEST,
    });
    let value = min(
        max(number(key), least.runtime()),
        comptime!(LARGEST).runtime(),
    );
    match comptime!(kind) {
        // A probability of +∞ is always chosen, and has weight 0.
        EstimateKind::Probability => select(key == INFINITE, 0.0f32.runtime(), value),
        EstimateKind::Logit => value,
    }
}

/// Returns the weight of a block, given its key.
#[cube]
pub fn weight(key: u32, row: &Row, #[comptime] kind: EstimateKind) -> f32 {
    let value = value(key, kind);
    match comptime!(kind) {
        EstimateKind::Probability => value,
        EstimateKind::Logit => (value - row.largest).exp(),
    }
}

/// Reduces `x` over the units of a row.
#[cube]
pub fn of_row(
    x: f32,
    shared: &mut [f32],
    #[comptime] by: Combine,
    #[comptime] c: BudgetTile,
) -> f32 {
    let mut result = x;
    if comptime!(c.votes) {
        #[unroll]
        for step in 0..comptime!(LANES.ilog2()) {
            let other = traded(result, comptime!(1u32 << step), c.ptx);
            result = combine::<f32>(result, other, by);
        }
    } else {
        result = across_lanes::<f32>(x, shared, c.tile, by);
    }
    result
}

/// Waits for all units of a cube's row before shared memory is used again. Planes use no shared memory.
#[cube]
pub fn meet(#[comptime] c: BudgetTile) {
    if comptime!(!c.votes) {
        sync_cube();
    }
}

/// Blocks of a row that a unit holds: their keys, or 0 if a rule may not choose them, and their weights.
#[derive(CubeType)]
pub struct Held {
    pub keys: Array<u32>,
    pub weights: Array<f32>,
}

/// Number and weight of blocks above a bound.
#[derive(CubeType, Clone, Copy)]
pub struct Above {
    pub weight_sum: f32,
    pub count: u32,
}

/// Returns the number of blocks above a bound that are not forced and, with `weighs`, their weight.
#[cube]
pub fn above(
    scores: &[u32],
    own: &Held,
    bound: u32,
    row: &Row,
    shared: &mut [f32],
    step: usize,
    #[comptime] weighs: bool,
    #[comptime] c: BudgetTile,
) -> Above {
    let mut weight_sum = 0.0f32.runtime();
    let mut count = 0u32.runtime();
    if comptime!(c.held > 0) {
        #[unroll]
        for i in 0..comptime!(c.held) {
            let is_above = own.keys[i] > bound;
            count += select(is_above, 1u32, 0u32);
            if comptime!(weighs) {
                weight_sum += select(is_above, own.weights[i], 0.0f32);
            }
        }
    } else {
        let mut block = UNIT_POS as usize;
        while block < row.grid.kv_blocks {
            let key = block_at(scores, block, row, c).free_key();
            if key > bound {
                if comptime!(weighs) {
                    weight_sum += weight(key, row, c.kind);
                }
                count += 1u32;
            }
            block += comptime!(c.tile.lanes);
        }
    }
    if comptime!(c.votes) {
        if comptime!(weighs) {
            weight_sum = of_row(weight_sum, shared, Combine::Sum, c);
        }
        Above {
            weight_sum,
            count: total(count, c.ptx),
        }
    } else {
        let count = f32::cast_from(count);
        let both = pair_across_lanes::<f32>(weight_sum, count, shared, step, c.tile);
        Above {
            weight_sum: both.a,
            count: u32::cast_from(both.b),
        }
    }
}

/// Whether several keys may lie between `low` and `high`, judging by the counts.
#[cube]
fn is_open(low: u32, high: u32, from_low: u32, above_high: u32, #[comptime] weighs: bool) -> bool {
    let mut result = low < high;
    if comptime!(weighs) {
        result = result && from_low > above_high + 1;
    }
    result
}

/// Returns the smallest bound above which blocks weigh less than `limit`. Without `weighs`, returns a bound above which there are `wanted` blocks, or else
/// the smallest above which there are fewer.
#[cube]
pub fn bound_of(
    scores: &[u32],
    own: &Held,
    limit: f32,
    wanted: u32,
    row: &Row,
    shared: &mut [f32],
    #[comptime] weighs: bool,
    #[comptime] c: BudgetTile,
) -> u32 {
    let mut low = 0u32.runtime();
    let mut high = 0xffff_ffffu32.runtime();
    if comptime!(c.votes) {
        // The lowest and the highest key. Without keys, the first is above the second.
        let mut least = 0xffff_ffffu32.runtime();
        let mut most = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(c.held) {
            let key = own.keys[i];
            least = least.min(select(key == 0u32, 0xffff_ffffu32, key));
            most = most.max(key);
        }
        low = lowest(least, c.ptx);
        high = highest(most, c.ptx);
    }
    if comptime!(!weighs) {
        // If all are wanted, the bound is 0.
        low = select(wanted < row.others, low, 0u32);
        high = select(wanted < row.others, high, 0u32);
    }
    // Number of keys from `low` on, and of keys above `high`.
    let mut from_low = row.others;
    let mut above_high = 0u32.runtime();
    let mut step = 0usize.runtime();
    if comptime!(c.votes) {
        step = select(
            is_open(low, high, from_low, above_high, weighs),
            0usize,
            32usize,
        );
    }
    while step < 32 {
        let middle = low + (high - low) / 2;
        let there = above(scores, own, middle, row, shared, step, weighs, c);
        let mut is_enough = there.count <= wanted;
        if comptime!(weighs) {
            is_enough = there.weight_sum < limit;
        }
        if low < high {
            if is_enough {
                high = middle;
                above_high = there.count;
            } else {
                low = middle + 1;
                from_low = there.count;
            }
            if comptime!(!weighs) {
                low = select(there.count == wanted, middle, low);
            }
        }
        step += 1;
        // The units of a plane may stop early. A cube's units must reach barriers equally often.
        if comptime!(c.votes) {
            step = select(
                is_open(low, high, from_low, above_high, weighs),
                step,
                32usize,
            );
        }
    }
    if comptime!(c.votes && weighs) {
        // One distinct key is left.
        let mut bound = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(c.held) {
            let is_left = own.keys[i] >= low && own.keys[i] <= high;
            bound = bound.max(select(is_left, own.keys[i], 0u32));
        }
        low = highest(bound, c.ptx);
    }
    // The next search begins with the other half of the shared memory.
    meet(c);
    low
}

/// Returns how many keys of a plane's row are above a bound.
#[cube]
pub fn count_of(own: &Held, bound: u32, #[comptime] c: BudgetTile) -> u32 {
    let mut count = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(c.held) {
        count += select(own.keys[i] > bound, 1u32, 0u32);
    }
    total(count, c.ptx)
}

/// Whether a block has at least the weight `least`, or is always chosen.
#[cube]
pub fn is_above_share(key: u32, least: f32, row: &Row, #[comptime] c: BudgetTile) -> bool {
    let mut result = weight(key, row, c.kind) >= least;
    if comptime!(matches!(c.kind, EstimateKind::Probability)) {
        result = result || key == INFINITE;
    }
    result
}
