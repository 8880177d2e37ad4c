//! From scores to bits: the rules of [`Rule`] on the device.
//!
//! Nothing is sorted. Scores become integers of the same order, and a bisection of at most 32 steps finds the bound above which there are enough blocks, or
//! enough weight. Short rows on devices with planes of 32 units have a plane each: its units add up their counts without barriers, the search stops as soon
//! as the bound has the wanted number of blocks above it, and the votes on the units' `i`-th blocks are word `i` of the row's bits. Otherwise a cube has a
//! row.

use cubecl::prelude::*;

use super::bits::Grid;
use super::budget_search::{
    Held, Row, above, block_at, bound_of, count_of, is_above_share, meet, of_row, value, weight,
};
use super::budget_tile::{BudgetKind, BudgetTile, RuleScalars};
use crate::arch::planes::{total, votes};
use crate::shared::order_key::{INFINITE, key};
use crate::shared::row_tile::{Combine, pair_across_lanes, pair_shared};
use blocksparse::EstimateKind;
use blocksparse::internal::{LARGEST, WHOLE};

/// Makes `bits` `[patterns, q_blocks, words]` of a cube's rows from `scores` `[patterns, q_blocks, kv_blocks]`, the bits of f32 numbers:
///
/// ```text
/// m      = number of kept blocks that are not forced
/// bound  = the least number with fewer than m of their keys above it, or one with exactly m above it
/// chosen = forced blocks, blocks with keys above the bound, and the first blocks with keys equal to it, up to m
/// ```
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn from_scores(
    scores: &[u32],
    bits: &mut [u32],
    grid: Grid,
    rule: RuleScalars,
    rows: usize,
    #[comptime] c: BudgetTile,
) {
    let lanes = comptime!(c.tile.lanes);
    let lane = UNIT_POS as usize % lanes;
    let own_row = CUBE_POS * comptime!(c.tile.rows) + UNIT_POS as usize / lanes;
    // Units beyond the last row repeat it. In planes, they write nothing.
    let at_row = own_row.min(rows - 1);
    let mut shared = Shared::<[f32]>::new_slice(comptime!(pair_shared(&c.tile)));
    let mut one = Shared::<[f32]>::new_slice(comptime!(c.tile.shared()));
    let mut row = Row {
        start: at_row * grid.kv_blocks,
        q_block: at_row % grid.q_blocks,
        largest: comptime!(-LARGEST).runtime(),
        others: 0u32.runtime(),
        grid,
        rule,
    };
    // Unused elements, if the unit holds no blocks.
    let mut keys = Array::<u32>::new(comptime!(c.held.max(1)));
    let mut weights = Array::<f32>::new(comptime!(c.held.max(1)));
    // The unit's forced blocks, one bit each.
    let mut forced_mask = 0u32.runtime();
    let mut forced = 0u32.runtime();
    if comptime!(c.held > 0) {
        #[unroll]
        for i in 0..comptime!(c.held) {
            let block = lane + comptime!(i * lanes);
            let block = block_at(scores, block, &row, c);
            if comptime!(c.has_largest()) {
                let value = value(block.key, c.kind);
                let none = comptime!(-LARGEST).runtime();
                row.largest = max(row.largest, select(block.is_seen, value, none));
            }
            keys[i] = block.free_key();
            forced_mask |= select(block.is_forced, comptime!(1u32 << i).runtime(), 0u32);
            row.others += select(block.is_seen && !block.is_forced, 1u32, 0u32);
        }
        forced = forced_mask.count_ones();
    } else {
        let mut at = lane;
        while at < row.grid.kv_blocks {
            let block = block_at(scores, at, &row, c);
            if comptime!(c.has_largest()) {
                let value = value(block.key, c.kind);
                let none = comptime!(-LARGEST).runtime();
                row.largest = max(row.largest, select(block.is_seen, value, none));
            }
            forced += select(block.is_forced, 1u32, 0u32);
            row.others += select(block.is_seen && !block.is_forced, 1u32, 0u32);
            at += lanes;
        }
    }
    let forced_blocks = if comptime!(c.votes) {
        row.others = total(row.others, c.ptx);
        f32::cast_from(total(forced, c.ptx))
    } else {
        let (a, b) = (f32::cast_from(forced), f32::cast_from(row.others));
        let both = pair_across_lanes::<f32>(a, b, &mut shared, 1usize, c.tile);
        row.others = u32::cast_from(both.b);
        both.a
    };
    if comptime!(c.has_largest()) {
        row.largest = of_row(row.largest, &mut one, Combine::Max, c);
    }
    meet(c);
    if comptime!(c.weighs()) {
        #[unroll]
        for i in 0..comptime!(c.held) {
            weights[i] = weight(keys[i], &row, c.kind);
        }
    }
    let own = Held { keys, weights };

    let mut wanted = 0.0f32.runtime();
    // Least weight that is kept.
    let mut least = 0.0f32.runtime();
    // Key at which the share of weights is reached, if one was searched.
    let mut reached = 0u32.runtime();
    match comptime!(c.budget) {
        BudgetKind::TopK => {
            wanted = max(f32::cast_from(row.rule.least) - forced_blocks, 0.0f32);
        }
        BudgetKind::Ratio => {
            let visible = u32::cast_from(forced_blocks) + row.others;
            let kept = (visible * row.rule.least).div_ceil(comptime!(WHOLE));
            wanted = max(f32::cast_from(kept) - forced_blocks, 0.0f32);
        }
        BudgetKind::TopP => {
            let mut of_forced = 0.0f32.runtime();
            if comptime!(c.held > 0) {
                #[unroll]
                for i in 0..comptime!(c.held) {
                    let block = (lane + comptime!(i * lanes)).min(row.grid.kv_blocks - 1);
                    let of_block = weight(key(scores[row.start + block]), &row, c.kind);
                    let is_forced = (forced_mask >> comptime!(i as u32)) & 1u32 == 1u32;
                    of_forced += select(is_forced, of_block, 0.0f32);
                }
            } else {
                let mut at = lane;
                while at < row.grid.kv_blocks {
                    let block = block_at(scores, at, &row, c);
                    let of_block = weight(block.key, &row, c.kind);
                    of_forced += select(block.is_forced, of_block, 0.0f32);
                    at += lanes;
                }
            }
            let of_forced = of_row(of_forced, &mut one, Combine::Sum, c);
            let rest = above(scores, &own, 0u32, &row, &mut shared, 0usize, true, c);
            meet(c);
            let needed = row.rule.share * (of_forced + rest.weight_sum) - of_forced;
            if row.rule.share >= 1.0f32 {
                wanted = f32::cast_from(row.others);
            } else if needed > 0.0f32 {
                let bound = bound_of(scores, &own, needed, 0u32, &row, &mut shared, true, c);
                let there = above(scores, &own, bound, &row, &mut shared, 0usize, true, c);
                meet(c);
                wanted = f32::cast_from(there.count);
                reached = bound;
                // The sum of all may be rounded below the needed weight. Then the bound is 0, which is no score's key.
                if bound != 0u32 {
                    let of_bound = weight(bound, &row, c.kind);
                    let ties = ((needed - there.weight_sum) / of_bound).ceil();
                    // The number of ties is limited by the number of blocks.
                    wanted = min(wanted + ties, f32::cast_from(row.others));
                }
            }
            if comptime!(matches!(c.kind, EstimateKind::Probability)) {
                let bound = comptime!(INFINITE - 1).runtime();
                let first = above(scores, &own, bound, &row, &mut shared, 0usize, false, c);
                meet(c);
                wanted = max(wanted, f32::cast_from(first.count));
            }
            wanted = max(wanted, f32::cast_from(row.rule.least) - forced_blocks);
            wanted = max(
                min(wanted, f32::cast_from(row.rule.most) - forced_blocks),
                0.0f32,
            );
        }
        BudgetKind::MinP => {
            least = match comptime!(c.kind) {
                EstimateKind::Probability => row.rule.share * row.largest,
                EstimateKind::Logit => row.rule.share,
            };
        }
    }

    let mut bound = 0u32.runtime();
    let mut left = 0u32.runtime();
    if comptime!(c.budget != BudgetKind::MinP) {
        let wanted = u32::cast_from(min(wanted, f32::cast_from(row.others)));
        if comptime!(c.votes && c.weighs()) {
            // The bound of the share also serves if `wanted` is the keys above it plus some that equal it.
            let above_it = count_of(&own, reached, c);
            let from_it = count_of(&own, reached.max(1u32) - 1u32, c);
            bound = reached;
            if reached == 0u32 || above_it > wanted || wanted > from_it {
                bound = bound_of(scores, &own, 0.0f32, wanted, &row, &mut shared, false, c);
            }
        } else {
            bound = bound_of(scores, &own, 0.0f32, wanted, &row, &mut shared, false, c);
        }
        let there = above(scores, &own, bound, &row, &mut shared, 0usize, false, c);
        meet(c);
        left = wanted.max(there.count) - there.count;
    }

    if comptime!(c.votes) {
        let before_lane = (1u32 << lane as u32) - 1u32;
        let mut own_word = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(c.held) {
            let key = own.keys[i];
            let is_free = key != 0u32;
            let mut keeps = (forced_mask >> comptime!(i as u32)) & 1u32 == 1u32;
            if comptime!(c.budget == BudgetKind::MinP) {
                keeps = keeps || (is_free && is_above_share(key, least, &row, c));
            } else {
                // Blocks that equal the bound are kept in order.
                let is_equal = is_free && key == bound;
                let equal = votes(is_equal, c.ptx);
                let before = (equal & before_lane).count_ones();
                keeps = keeps || key > bound || (is_equal && before < left);
                left = left.max(equal.count_ones()) - equal.count_ones();
            }
            let word = votes(keeps, c.ptx);
            own_word = select(lane == comptime!(i), word, own_word);
        }
        if own_row < rows && lane < row.grid.words {
            bits[at_row * row.grid.words + lane] = own_word;
        }
    } else {
        // Likewise, blocks that equal the bound are kept in order. A lane has consecutive whole words.
        let own_words = row.grid.words.div_ceil(lanes);
        let first_word = (lane * own_words).min(row.grid.words);
        let end_word = (first_word + own_words).min(row.grid.words);
        if comptime!(c.budget != BudgetKind::MinP) {
            let mut equals = Shared::<[u32]>::new_slice(lanes);
            let mut equal = 0u32.runtime();
            for block in first_word * 32..end_word * 32 {
                let key = block_at(scores, block, &row, c).free_key();
                equal += select(key != 0u32 && key == bound, 1u32, 0u32);
            }
            equals[lane] = equal;
            sync_cube();
            let mut before = 0u32.runtime();
            for unit in 0..lane {
                before += equals[unit];
            }
            left = left.max(before) - before;
        }
        for word in first_word..end_word {
            let mut kept = 0u32;
            for bit in 0..32usize {
                let block = block_at(scores, word * 32 + bit, &row, c);
                let key = block.free_key();
                let mut keeps = block.is_forced;
                if comptime!(c.budget == BudgetKind::MinP) {
                    keeps = keeps || (key != 0u32 && is_above_share(key, least, &row, c));
                } else {
                    let is_equal = key != 0u32 && key == bound && left > 0u32;
                    keeps = keeps || key > bound || is_equal;
                    left -= select(is_equal, 1u32, 0u32);
                }
                kept |= select(keeps, 1u32 << bit as u32, 0u32);
            }
            bits[at_row * row.grid.words + word] = kept;
        }
    }
}
