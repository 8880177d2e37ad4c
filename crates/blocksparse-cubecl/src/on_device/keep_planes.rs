//! The rules of [`keep`](super::keep) where a plane of 32 units holds a row: units add up what each has counted, and meet no barrier.
//!
//! A bound is looked for between the lowest and the highest score of the row, and found as soon as it has as many blocks above it as are wanted. A plane's
//! votes on its `i`-th blocks are word `i` of the row's bits.

use cubecl::prelude::*;

use super::bits::{Grid, seen};
use super::keep::{By, Numbers, Row, WANTED, forced, value, weight, weight_of_largest};
use crate::arch::planes::{LANES, are_there, have_ptx, highest, lowest, total, traded, votes};
use crate::shared::order_key::key;
use blocksparse::internal::{LARGEST, WHOLE};
use blocksparse::{EstimateKind, Rule};

/// Blocks of a unit, at most: a word of the row's bits each, of which a unit writes one.
const MOST_HELD: usize = 32;

/// Rows of a cube.
const ROWS: usize = 4;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByPlanes {
    by: By,
    kind: EstimateKind,
    causal: bool,
    /// Blocks of a unit.
    held: usize,
    /// Whether units meet by PTX.
    ptx: bool,
}

impl ByPlanes {
    /// Of rows of so many blocks. `None` if the device has other planes, or rows are too long.
    pub fn new(
        properties: &DeviceProperties,
        rule: &Rule,
        blocks: usize,
        causal: bool,
    ) -> Option<Self> {
        let hardware = &properties.hardware;
        let units = (LANES * ROWS) as u32;
        let fits = hardware.max_units_per_cube >= units && hardware.max_cube_dim.0 >= units;
        let held = blocks.div_ceil(LANES);
        (are_there(properties) && fits && (1..=MOST_HELD).contains(&held)).then(|| Self {
            by: By::of(rule),
            kind: rule.kind,
            causal,
            held,
            ptx: have_ptx(properties),
        })
    }

    /// Units of a cube.
    pub fn units(&self) -> u32 {
        (LANES * ROWS) as u32
    }

    /// Rows of a cube.
    pub fn rows(&self) -> usize {
        ROWS
    }
}

/// The sum of the numbers of a plane.
#[cube]
fn sum(number: f32, #[comptime] ptx: bool) -> f32 {
    let mut result = number;
    #[unroll]
    for step in 0..comptime!(LANES.ilog2()) {
        result += traded(result, comptime!(1u32 << step), ptx);
    }
    result
}

/// The largest number of a plane.
#[cube]
fn largest(number: f32, #[comptime] ptx: bool) -> f32 {
    let mut result = number;
    #[unroll]
    for step in 0..comptime!(LANES.ilog2()) {
        result = max(result, traded(result, comptime!(1u32 << step), ptx));
    }
    result
}

/// How many keys of the row are above a bound.
#[cube]
fn count(keys: &Array<u32>, bound: u32, #[comptime] c: ByPlanes) -> u32 {
    let mut own = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(c.held) {
        own += select(keys[i] > bound, 1u32, 0u32);
    }
    total(own, comptime!(c.ptx))
}

/// What the blocks above a bound weigh.
#[cube]
fn mass(keys: &Array<u32>, weights: &Array<f32>, bound: u32, #[comptime] c: ByPlanes) -> f32 {
    let mut mass = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(c.held) {
        mass += select(keys[i] > bound, weights[i], 0.0f32);
    }
    sum(mass, comptime!(c.ptx))
}

/// The keys between which a bound is, but for those that are 0.
#[derive(CubeType, Clone, Copy)]
struct Ends {
    lowest: u32,
    highest: u32,
}

/// The lowest and the highest key of the row: of none the first is above the second.
#[cube]
fn ends(keys: &Array<u32>, #[comptime] c: ByPlanes) -> Ends {
    let mut low = 0xffff_ffffu32.runtime();
    let mut high = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(c.held) {
        let own = keys[i];
        low = low.min(select(own == 0u32, 0xffff_ffffu32, own));
        high = high.max(own);
    }
    Ends {
        lowest: lowest(low, comptime!(c.ptx)),
        highest: highest(high, comptime!(c.ptx)),
    }
}

/// The smallest bound above which blocks weigh less than `limit`: a key, or 0 if there is none. `others` keys are not 0.
#[cube]
fn bound_of_mass(
    keys: &Array<u32>,
    weights: &Array<f32>,
    limit: f32,
    others: u32,
    #[comptime] c: ByPlanes,
) -> u32 {
    let ends = ends(keys, c);
    let mut low = ends.lowest;
    let mut high = ends.highest;
    // Keys from `low` on, and above `high`.
    let mut from_low = others;
    let mut above_high = 0u32.runtime();
    let mut is_open = low < high && from_low > above_high + 1;
    while is_open {
        let middle = low + (high - low) / 2;
        let there = count(keys, middle, c);
        if mass(keys, weights, middle, c) < limit {
            high = middle;
            above_high = there;
        } else {
            low = middle + 1;
            from_low = there;
        }
        is_open = low < high && from_low > above_high + 1;
    }
    // What is left is one key, or keys that are equal.
    let mut bound = 0u32.runtime();
    #[unroll]
    for i in 0..comptime!(c.held) {
        let is_left = keys[i] >= low && keys[i] <= high;
        bound = bound.max(select(is_left, keys[i], 0u32));
    }
    highest(bound, comptime!(c.ptx))
}

/// A bound above which there are `wanted` keys, or the smallest above which there are fewer. `others` keys are not 0.
#[cube]
fn bound_of_count(keys: &Array<u32>, wanted: u32, others: u32, #[comptime] c: ByPlanes) -> u32 {
    let ends = ends(keys, c);
    let mut low = 0u32.runtime();
    // All are wanted: those above 0.
    let mut high = 0u32.runtime();
    if wanted < others {
        low = ends.lowest;
        high = ends.highest;
    }
    let mut is_open = low < high;
    while is_open {
        let middle = low + (high - low) / 2;
        let there = count(keys, middle, c);
        if there > wanted {
            low = middle + 1;
        } else {
            high = middle;
        }
        if there == wanted {
            low = middle;
        }
        is_open = low < high;
    }
    low
}

/// Whether `wanted` keys are those above one and some that equal it.
#[cube]
fn is_bound(keys: &Array<u32>, bound: u32, wanted: u32, #[comptime] c: ByPlanes) -> bool {
    let above = count(keys, bound, c);
    let from = count(keys, bound.max(1u32) - 1u32, c);
    bound != 0u32 && above <= wanted && wanted <= from
}

/// As [`from_scores`](super::keep::from_scores), a plane a row.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn from_scores_by_planes(
    scores: &[u32],
    bits: &mut [u32],
    grid: Grid,
    rule: Numbers,
    rows: usize,
    #[comptime] c: ByPlanes,
) {
    let held = comptime!(c.held);
    let lane = UNIT_POS as usize % comptime!(LANES);
    let own = CUBE_POS * comptime!(ROWS) + UNIT_POS as usize / comptime!(LANES);
    // Planes beyond the last row have it, too, and write nothing.
    let at_row = own.min(rows - 1);
    let mut row = Row {
        start: at_row * grid.kv_blocks,
        q_block: at_row % grid.q_blocks,
        largest: comptime!(-LARGEST).runtime(),
    };
    // Keys that a rule may choose, 0 for others; the unit's blocks that are forced, as bits.
    let mut keys = Array::<u32>::new(held);
    let mut forced_mask = 0u32.runtime();
    let mut others = 0u32.runtime();
    #[unroll]
    for i in 0..held {
        let block = lane + comptime!(i * LANES);
        let is_seen = seen(row.q_block, block, &grid, comptime!(c.causal));
        let is_forced = is_seen && forced(row.q_block, block, &grid, &rule);
        // No branch: all units of a plane vote.
        let own_key = key(scores[row.start + block.min(grid.kv_blocks - 1)]);
        if comptime!(matches!(c.by, By::TopP | By::AboveMax)) {
            let value = value(own_key, comptime!(c.kind));
            let none = comptime!(-LARGEST).runtime();
            row.largest = max(row.largest, select(is_seen, value, none));
        }
        keys[i] = select(is_seen && !is_forced, own_key, 0u32);
        forced_mask |= select(is_forced, comptime!(1u32 << i).runtime(), 0u32);
        others += select(is_seen && !is_forced, 1u32, 0u32);
    }
    let forced_count = total(forced_mask.count_ones(), comptime!(c.ptx));
    let others = total(others, comptime!(c.ptx));
    if comptime!(matches!(c.by, By::TopP | By::AboveMax)) {
        row.largest = largest(row.largest, comptime!(c.ptx));
    }

    let forced_blocks = f32::cast_from(forced_count);
    let mut wanted = 0.0f32.runtime();
    // The least weight that is kept.
    let mut least = 0.0f32.runtime();
    // The key at which a share is reached, if one was looked for.
    let mut reached = 0u32.runtime();
    match comptime!(c.by) {
        By::TopK => {
            wanted = max(f32::cast_from(rule.least) - forced_blocks, 0.0f32);
        }
        By::Ratio => {
            let visible = forced_count + others;
            let kept = (visible * rule.least).div_ceil(comptime!(WHOLE));
            wanted = max(f32::cast_from(kept) - forced_blocks, 0.0f32);
        }
        By::TopP => {
            let mut weights = Array::<f32>::new(held);
            let mut of_forced = 0.0f32.runtime();
            #[unroll]
            for i in 0..held {
                weights[i] = weight(keys[i], &row, comptime!(c.kind));
                let block = (lane + comptime!(i * LANES)).min(grid.kv_blocks - 1);
                let own = weight(key(scores[row.start + block]), &row, comptime!(c.kind));
                let is_forced = (forced_mask >> comptime!(i as u32)) & 1u32 == 1u32;
                of_forced += select(is_forced, own, 0.0f32);
            }
            let of_forced = sum(of_forced, comptime!(c.ptx));
            let rest = mass(&keys, &weights, 0u32, c);
            let needed = rule.share * (of_forced + rest) - of_forced;
            if rule.share >= 1.0f32 {
                wanted = f32::cast_from(others);
            } else if needed > 0.0f32 {
                let bound = bound_of_mass(&keys, &weights, needed, others, c);
                wanted = f32::cast_from(count(&keys, bound, c));
                // All together may be rounded to less than what is needed: then the bound is 0, which is no score's key.
                reached = bound;
                if bound != 0u32 {
                    let there = mass(&keys, &weights, bound, c);
                    let ties = ((needed - there) / weight(bound, &row, comptime!(c.kind))).ceil();
                    // Those that equal it cannot be more than all.
                    wanted = min(wanted + ties, f32::cast_from(others));
                }
            }
            if comptime!(matches!(c.kind, EstimateKind::Probability)) {
                let first = count(&keys, comptime!(WANTED - 1).runtime(), c);
                wanted = max(wanted, f32::cast_from(first));
            }
            wanted = max(wanted, f32::cast_from(rule.least) - forced_blocks);
            wanted = max(
                min(wanted, f32::cast_from(rule.most) - forced_blocks),
                0.0f32,
            );
        }
        By::AboveMax => {
            least = rule.share * weight_of_largest(&row, comptime!(c.kind));
        }
    }

    let mut bound = 0u32.runtime();
    let mut left = 0u32.runtime();
    if comptime!(!matches!(c.by, By::AboveMax)) {
        let wanted = u32::cast_from(min(wanted, f32::cast_from(others)));
        let mut is_known = false.runtime();
        if comptime!(matches!(c.by, By::TopP)) {
            is_known = is_bound(&keys, reached, wanted, c);
        }
        if is_known {
            bound = reached;
        } else {
            bound = bound_of_count(&keys, wanted, others, c);
        }
        let there = count(&keys, bound, c);
        left = wanted.max(there) - there;
    }
    let before_lane = (1u32 << lane as u32) - 1u32;
    let mut own_word = 0u32.runtime();
    #[unroll]
    for i in 0..held {
        let is_free = keys[i] != 0u32;
        let mut keeps = (forced_mask >> comptime!(i as u32)) & 1u32 == 1u32;
        match comptime!(matches!(c.by, By::AboveMax)) {
            true => {
                let mut is_kept = weight(keys[i], &row, comptime!(c.kind)) >= least;
                if comptime!(matches!(c.kind, EstimateKind::Probability)) {
                    is_kept = is_kept || keys[i] == WANTED;
                }
                keeps = keeps || (is_free && is_kept);
            }
            false => {
                // Those that equal the bound are kept in their order.
                let is_equal = is_free && keys[i] == bound;
                let equal = votes(is_equal, comptime!(c.ptx));
                let before = (equal & before_lane).count_ones();
                keeps = keeps || keys[i] > bound || (is_equal && before < left);
                left = left.max(equal.count_ones()) - equal.count_ones();
            }
        }
        let word = votes(keeps, comptime!(c.ptx));
        own_word = select(lane == comptime!(i), word, own_word);
    }
    if own < rows && lane < grid.words {
        bits[at_row * grid.words + lane] = own_word;
    }
}
