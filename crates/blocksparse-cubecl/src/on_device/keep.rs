//! From scores to bits: the rules of [`Rule`], on the device.
//!
//! Nothing is sorted. Scores in their order are whole numbers in the same order, so how many are above one, and how much they weigh, is asked of a
//! bound, which 32 halvings find. A cube has a row, and where a row is no longer than its units can hold, its numbers are read once. Where there are planes
//! of 32 units and rows are short, [`keep_planes`](super::keep_planes) does the same.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

use crate::shared::order_key::{key, number};

use super::bits::{Grid, HIDDEN, first_position, last_position, seen};
use crate::error::KernelError;
use crate::shared::row_tile::{
    Combine, Pair, RowTile, across_lanes, pair_across_lanes, pair_shared,
};
use blocksparse::internal::{LARGEST, WHOLE, parts_of};
use blocksparse::{Budget, EstimateKind, Rule};

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Units of a row, at least and at most, if the device has them.
const UNITS: [usize; 2] = [32, 256];

/// Blocks of a unit, where units are between these: few units, because each halving is a sum over all of them.
const UNIT_BLOCKS: usize = 16;

/// Blocks that a unit holds, at most; of longer rows it reads them again.
const MOST_HELD: usize = 16;

/// What of a [`Budget`] is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum By {
    TopK,
    Ratio,
    TopP,
    AboveMax,
}

impl By {
    /// What of a rule is compiled.
    pub fn of(rule: &Rule) -> Self {
        match rule.keep {
            Budget::TopK(_) => Self::TopK,
            Budget::Ratio(_) => Self::Ratio,
            Budget::TopP { .. } => Self::TopP,
            Budget::MinP(_) => Self::AboveMax,
        }
    }
}

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chosen {
    tile: RowTile,
    by: By,
    kind: EstimateKind,
    causal: bool,
    /// Whether scores say which blocks there are none of: [`HIDDEN`].
    hides: bool,
    /// Blocks that a unit holds, 0 if they are too many.
    held: usize,
}

impl Chosen {
    /// Of rows of so many blocks.
    ///
    /// # Errors
    /// [`KernelError`] if the device has no cubes of as many units.
    pub fn new(
        properties: &DeviceProperties,
        rule: &Rule,
        blocks: usize,
        causal: bool,
    ) -> Result<Self, KernelError> {
        let hardware = &properties.hardware;
        let most = (hardware.max_units_per_cube as usize).min(hardware.max_cube_dim.0 as usize);
        let [low, high] = UNITS;
        let lanes = blocks.div_ceil(UNIT_BLOCKS).next_power_of_two();
        let lanes = lanes.clamp(low, high).min(1 << most.max(1).ilog2());
        let limit = || KernelError::limit("units of a row", most as u32, most + 1);
        let tile = RowTile::new(properties, lanes, F32, 1).ok_or_else(limit)?;
        let held = blocks.div_ceil(lanes);
        Ok(Self {
            tile: RowTile {
                lanes,
                rows: 1,
                vector: 1,
                // Rows are as long as a launch says.
                row_vectors: 0,
                plane: tile.plane.min(lanes),
            },
            by: By::of(rule),
            kind: rule.kind,
            causal,
            hides: false,
            held: if held <= MOST_HELD { held } else { 0 },
        })
    }

    /// Sets whether scores say which blocks cannot be chosen.
    pub fn hides(mut self, hides: bool) -> Self {
        self.hides = hides;
        self
    }

    /// Units of a cube.
    pub fn units(&self) -> u32 {
        self.tile.lanes as u32
    }
}

/// A rule's numbers.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Numbers {
    /// Blocks, or parts of them, or the fewest of a share of weights.
    pub least: u32,
    /// The most blocks of a share of weights.
    pub most: u32,
    /// A share of weights.
    pub share: f32,
    /// How many blocks up to the queries' own are forced, at most one more than there are.
    pub local: usize,
    /// How many of the first key blocks are forced.
    pub first: usize,
}

/// The numbers of a rule, of rows of so many blocks.
pub fn numbers(rule: &Rule, blocks: usize) -> NumbersLaunch {
    let whole = |count: usize| u32::try_from(count.min(blocks)).unwrap_or(u32::MAX);
    let (least, most, share) = match rule.keep {
        Budget::TopK(k) => (whole(k), 0, 0.0),
        Budget::Ratio(ratio) => (parts_of(ratio), 0, 0.0),
        Budget::TopP { p, min, max } => (whole(min), whole(max), p),
        Budget::MinP(above) => (0, 0, above),
    };
    let (local, first) = (
        rule.forced.local.min(blocks + 1),
        rule.forced.first.min(blocks),
    );
    NumbersLaunch::new(least, most, share as f32, local, first)
}

/// A row of scores.
#[derive(CubeType, Clone, Copy)]
pub struct Row {
    /// Where it begins.
    pub start: usize,
    /// Its block of queries.
    pub q_block: usize,
    /// The largest score that is visible.
    pub largest: f32,
}

/// Whether a block can be chosen.
#[cube]
#[allow(clippy::collapsible_if)] // What is known at compile time stays apart from what is not.
fn visible(scores: &[u32], row: &Row, block: usize, grid: &Grid, #[comptime] c: Chosen) -> bool {
    let mut result = seen(row.q_block, block, grid, comptime!(c.causal));
    if comptime!(c.hides) {
        if result {
            result = scores[row.start + block] != HIDDEN;
        }
    }
    result
}

/// Whether a block is chosen whatever its score.
#[cube]
pub fn forced(q_block: usize, kv_block: usize, grid: &Grid, rule: &Numbers) -> bool {
    let start = (kv_block * grid.block) as i32;
    let near = start <= last_position(q_block, grid)
        && first_position(q_block, grid) - start < (rule.local * grid.block) as i32;
    kv_block < rule.first || (rule.local != 0 && near)
}

/// The key of +∞: as a mass, of a block that is wanted whatever the others get, and weighs nothing.
pub const WANTED: u32 = 0xff80_0000;

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
        EstimateKind::Probability => select(key == WANTED, 0.0f32.runtime(), value),
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

/// The key of a block that a rule may choose, 0 (no number's) if it is forced or not seen.
#[cube]
fn free_key(
    scores: &[u32],
    block: usize,
    row: &Row,
    grid: &Grid,
    rule: &Numbers,
    #[comptime] c: Chosen,
) -> u32 {
    let mut result = 0u32.runtime();
    if visible(scores, row, block, grid, c) && !forced(row.q_block, block, grid, rule) {
        result = key(scores[row.start + block]);
    }
    result
}

/// What a unit holds of a row: the keys of its blocks that a rule may choose, and what they weigh.
#[derive(CubeType)]
struct Held {
    keys: Array<u32>,
    weights: Array<f32>,
}

/// The unit's every `lanes`-th block, if it holds them.
#[cube]
fn held(scores: &[u32], row: &Row, grid: &Grid, rule: &Numbers, #[comptime] c: Chosen) -> Held {
    // Without any, a place that nothing reads.
    let mut keys = Array::<u32>::new(comptime!(c.held.max(1)));
    let mut weights = Array::<f32>::new(comptime!(c.held.max(1)));
    #[unroll]
    for i in 0..comptime!(c.held) {
        let block = UNIT_POS as usize + comptime!(i * c.tile.lanes);
        keys[i] = free_key(scores, block, row, grid, rule, c);
        if comptime!(matches!(c.by, By::TopP)) {
            weights[i] = weight(keys[i], row, comptime!(c.kind));
        }
    }
    Held { keys, weights }
}

/// What the blocks above a bound weigh (`a`), and how many they are (`b`), of those that are not forced.
#[cube]
fn above(
    scores: &[u32],
    own: &Held,
    bound: u32,
    row: &Row,
    grid: &Grid,
    rule: &Numbers,
    shared: &mut [f32],
    step: usize,
    #[comptime] c: Chosen,
) -> Pair<f32> {
    let mut mass = 0.0f32.runtime();
    let mut count = 0.0f32.runtime();
    if comptime!(c.held > 0) {
        #[unroll]
        for i in 0..comptime!(c.held) {
            let is_above = own.keys[i] > bound;
            count += select(is_above, 1.0f32, 0.0f32);
            if comptime!(matches!(c.by, By::TopP)) {
                mass += select(is_above, own.weights[i], 0.0f32);
            }
        }
    } else {
        let mut block = UNIT_POS as usize;
        while block < grid.kv_blocks {
            let key = free_key(scores, block, row, grid, rule, c);
            if key > bound {
                if comptime!(matches!(c.by, By::TopP)) {
                    mass += weight(key, row, comptime!(c.kind));
                }
                count += 1.0f32;
            }
            block += comptime!(c.tile.lanes);
        }
    }
    pair_across_lanes::<f32>(mass, count, shared, step, comptime!(c.tile))
}

/// The smallest bound above which there are fewer blocks than `limit`, or which weigh less.
#[cube]
fn bound_of(
    scores: &[u32],
    own: &Held,
    limit: f32,
    row: &Row,
    grid: &Grid,
    rule: &Numbers,
    shared: &mut [f32],
    #[comptime] by_weight: bool,
    #[comptime] c: Chosen,
) -> u32 {
    let mut low = 0u32.runtime();
    let mut high = 0xffff_ffffu32.runtime();
    for step in 0..32usize {
        let middle = low + (high - low) / 2;
        let there = above(scores, own, middle, row, grid, rule, shared, step, c);
        let is_enough = match comptime!(by_weight) {
            true => there.a < limit,
            false => there.b < limit,
        };
        if low < high {
            if is_enough {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
    }
    // The next search begins with the other half of what is shared.
    sync_cube();
    low
}

/// `scores` `[patterns, q_blocks, kv_blocks]`, the bits of f32 numbers. A cube makes a row's `bits`, `[patterns, q_blocks, words]`:
///
/// ```text
/// m = how many of the blocks that are not forced are kept
/// bound = the smallest number that fewer than m keys of them are above
/// chosen: the forced blocks, keys above the bound, and the first of those that equal it, up to m
/// ```
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn from_scores(
    scores: &[u32],
    bits: &mut [u32],
    grid: Grid,
    rule: Numbers,
    rows: usize,
    #[comptime] c: Chosen,
) {
    // Cubes beyond the last row make it again.
    let at_row = CUBE_POS.min(rows - 1);
    let lane = UNIT_POS as usize;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(pair_shared(&c.tile)));
    let mut one = Shared::<[f32]>::new_slice(comptime!(c.tile.shared()));
    let mut equals = Shared::<[u32]>::new_slice(comptime!(c.tile.lanes));
    let mut row = Row {
        start: at_row * grid.kv_blocks,
        q_block: at_row % grid.q_blocks,
        largest: comptime!(-LARGEST).runtime(),
    };

    let mut forced_blocks = 0.0f32.runtime();
    let mut others = 0.0f32.runtime();
    let mut block = lane;
    while block < grid.kv_blocks {
        if visible(scores, &row, block, &grid, c) {
            if forced(row.q_block, block, &grid, &rule) {
                forced_blocks += 1.0f32;
            } else {
                others += 1.0f32;
            }
            if comptime!(matches!(c.by, By::TopP | By::AboveMax)) {
                let score = value(key(scores[row.start + block]), comptime!(c.kind));
                row.largest = max(row.largest, score);
            }
        }
        block += comptime!(c.tile.lanes);
    }
    let blocks = pair_across_lanes::<f32>(
        forced_blocks,
        others,
        &mut shared,
        1usize,
        comptime!(c.tile),
    );
    forced_blocks = blocks.a;
    others = blocks.b;
    if comptime!(matches!(c.by, By::TopP | By::AboveMax)) {
        row.largest = across_lanes::<f32>(row.largest, &mut one, comptime!(c.tile), Combine::Max);
    }
    sync_cube();
    let own = held(scores, &row, &grid, &rule, c);

    let mut wanted = 0.0f32.runtime();
    // The least weight that is kept.
    let mut least = 0.0f32.runtime();
    match comptime!(c.by) {
        By::TopK => {
            wanted = max(f32::cast_from(rule.least) - forced_blocks, 0.0f32);
        }
        By::Ratio => {
            let visible = u32::cast_from(forced_blocks + others);
            let kept = (visible * rule.least).div_ceil(comptime!(WHOLE));
            wanted = max(f32::cast_from(kept) - forced_blocks, 0.0f32);
        }
        By::TopP => {
            let mut of_forced = 0.0f32.runtime();
            let mut block = lane;
            while block < grid.kv_blocks {
                if visible(scores, &row, block, &grid, c)
                    && forced(row.q_block, block, &grid, &rule)
                {
                    of_forced += weight(key(scores[row.start + block]), &row, comptime!(c.kind));
                }
                block += comptime!(c.tile.lanes);
            }
            let of_forced =
                across_lanes::<f32>(of_forced, &mut one, comptime!(c.tile), Combine::Sum);
            let rest = above(
                scores,
                &own,
                0u32,
                &row,
                &grid,
                &rule,
                &mut shared,
                0usize,
                c,
            );
            sync_cube();
            let needed = rule.share * (of_forced + rest.a) - of_forced;
            if rule.share >= 1.0f32 {
                wanted = others;
            } else if needed > 0.0f32 {
                let bound = bound_of(
                    scores,
                    &own,
                    needed,
                    &row,
                    &grid,
                    &rule,
                    &mut shared,
                    true,
                    c,
                );
                let there = above(
                    scores,
                    &own,
                    bound,
                    &row,
                    &grid,
                    &rule,
                    &mut shared,
                    0usize,
                    c,
                );
                sync_cube();
                wanted = there.b;
                // All together may be rounded to less than what is needed: then the bound is 0, which is no score's key.
                if bound != 0u32 {
                    let ties = ((needed - there.a) / weight(bound, &row, comptime!(c.kind))).ceil();
                    // Those that equal it cannot be more than all.
                    wanted = min(wanted + ties, others);
                }
            }
            if comptime!(matches!(c.kind, EstimateKind::Probability)) {
                let first = above(
                    scores,
                    &own,
                    comptime!(WANTED - 1).runtime(),
                    &row,
                    &grid,
                    &rule,
                    &mut shared,
                    0usize,
                    c,
                );
                sync_cube();
                wanted = max(wanted, first.b);
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
    wanted = min(wanted, others);

    let mut bound = 0u32.runtime();
    let mut left = 0u32.runtime();
    if comptime!(!matches!(c.by, By::AboveMax)) {
        bound = bound_of(
            scores,
            &own,
            wanted,
            &row,
            &grid,
            &rule,
            &mut shared,
            false,
            c,
        );
        let there = above(
            scores,
            &own,
            bound,
            &row,
            &grid,
            &rule,
            &mut shared,
            0usize,
            c,
        );
        sync_cube();
        left = u32::cast_from(max(wanted - there.b, 0.0f32));
    }

    // Those that equal the bound are kept in their order: a lane has whole words, neighbours.
    let own_words = grid.words.div_ceil(comptime!(c.tile.lanes));
    let first_word = (lane * own_words).min(grid.words);
    let end_word = (first_word + own_words).min(grid.words);
    if comptime!(!matches!(c.by, By::AboveMax)) {
        let mut equal = 0u32.runtime();
        for block in first_word * 32..end_word * 32 {
            if visible(scores, &row, block, &grid, c) && !forced(row.q_block, block, &grid, &rule) {
                equal += select(key(scores[row.start + block]) == bound, 1u32, 0u32);
            }
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
            let block = word * 32 + bit;
            if visible(scores, &row, block, &grid, c) {
                let key = key(scores[row.start + block]);
                let mut keeps = forced(row.q_block, block, &grid, &rule);
                match comptime!(matches!(c.by, By::AboveMax)) {
                    true => {
                        keeps = keeps || weight(key, &row, comptime!(c.kind)) >= least;
                        if comptime!(matches!(c.kind, EstimateKind::Probability)) {
                            keeps = keeps || key == WANTED;
                        }
                    }
                    false => {
                        if !keeps {
                            keeps = key > bound;
                            if key == bound && left > 0u32 {
                                keeps = true;
                                left -= 1u32;
                            }
                        }
                    }
                }
                kept |= select(keeps, 1u32 << bit as u32, 0u32);
            }
        }
        bits[at_row * grid.words + word] = kept;
    }
}

/// What the largest score of a row weighs.
#[cube]
pub fn weight_of_largest(row: &Row, #[comptime] kind: EstimateKind) -> f32 {
    match comptime!(kind) {
        EstimateKind::Probability => row.largest,
        EstimateKind::Logit => 1.0f32.runtime(),
    }
}
