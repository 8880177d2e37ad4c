//! A row of scores, and the bound above which there are so many blocks, or which weigh so much.

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
    /// Where it begins.
    pub start: usize,
    /// Its block of queries.
    pub q_block: usize,
    /// The largest score that is visible.
    pub largest: f32,
    /// Blocks that a rule may choose.
    pub others: u32,
    pub grid: Grid,
    pub rule: RuleScalars,
}

/// A block of a row.
#[derive(CubeType, Clone, Copy)]
pub struct Block {
    pub key: u32,
    /// Whether it can be chosen,
    pub is_seen: bool,
    /// and is whatever its score.
    pub is_forced: bool,
}

#[cube]
impl Block {
    /// Its key if a rule may choose it, 0 (no number's) if it is forced or not seen.
    pub fn free_key(&self) -> u32 {
        select(self.is_seen && !self.is_forced, self.key, 0u32)
    }
}

/// No branch: all units of a plane vote.
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

/// A score of which a weight is made, by its key.
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
        // As a probability +∞ is wanted whatever the others get, and weighs nothing.
        EstimateKind::Probability => select(key == INFINITE, 0.0f32.runtime(), value),
        EstimateKind::Logit => value,
    }
}

/// What a block weighs, by its key.
#[cube]
pub fn weight(key: u32, row: &Row, #[comptime] kind: EstimateKind) -> f32 {
    let value = value(key, kind);
    match comptime!(kind) {
        EstimateKind::Probability => value,
        EstimateKind::Logit => (value - row.largest).exp(),
    }
}

/// The elements of a row's units as one.
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

/// Every unit of a cube's row gets here before what is shared is used again. Planes have nothing shared.
#[cube]
pub fn meet(#[comptime] c: BudgetTile) {
    if comptime!(!c.votes) {
        sync_cube();
    }
}

/// What a unit holds of a row: the keys of its blocks that a rule may choose, 0 for others, and what they weigh.
#[derive(CubeType)]
pub struct Held {
    pub keys: Array<u32>,
    pub weights: Array<f32>,
}

/// Blocks above a bound.
#[derive(CubeType, Clone, Copy)]
pub struct Above {
    pub weight_sum: f32,
    pub count: u32,
}

/// How many blocks are above a bound, of those that are not forced, and what they weigh if that is asked.
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

/// Whether there is more than one key from `low` to `high`, as far as numbers of keys say so.
#[cube]
fn is_open(low: u32, high: u32, from_low: u32, above_high: u32, #[comptime] weighs: bool) -> bool {
    let mut result = low < high;
    if comptime!(weighs) {
        result = result && from_low > above_high + 1;
    }
    result
}

/// The smallest bound above which blocks weigh less than `limit`, or, where nothing weighs, a bound above which there are `wanted` blocks, or the smallest above
/// which there are fewer.
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
        // The lowest and the highest key: of none the first is above the second.
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
        // All are wanted: those above 0.
        low = select(wanted < row.others, low, 0u32);
        high = select(wanted < row.others, high, 0u32);
    }
    // Keys from `low` on, and above `high`.
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
        // The units of a plane may stop; a cube's meet barriers as often as all others.
        if comptime!(c.votes) {
            step = select(
                is_open(low, high, from_low, above_high, weighs),
                step,
                32usize,
            );
        }
    }
    if comptime!(c.votes && weighs) {
        // What is left is one key, or keys that are equal.
        let mut bound = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(c.held) {
            let is_left = own.keys[i] >= low && own.keys[i] <= high;
            bound = bound.max(select(is_left, own.keys[i], 0u32));
        }
        low = highest(bound, c.ptx);
    }
    // The next search begins with the other half of what is shared.
    meet(c);
    low
}

/// How many keys of a plane's row are above a bound.
#[cube]
pub fn count_of(own: &Held, bound: u32, #[comptime] c: BudgetTile) -> u32 {
    let mut count = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(c.held) {
        count += select(own.keys[i] > bound, 1u32, 0u32);
    }
    total(count, c.ptx)
}

/// Whether a block weighs a share of what the largest does, or is wanted whatever it weighs.
#[cube]
pub fn is_above_share(key: u32, least: f32, row: &Row, #[comptime] c: BudgetTile) -> bool {
    let mut result = weight(key, row, c.kind) >= least;
    if comptime!(matches!(c.kind, EstimateKind::Probability)) {
        result = result || key == INFINITE;
    }
    result
}
