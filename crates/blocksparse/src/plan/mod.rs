//! [`TilePlan`]: the work of one kernel launch.
//!
//! A kernel computes tiles of `rows` queries (or keys, in the pass over columns). For each tile it reads
//! *steps* of `cols` keys (or queries). The blocks of a layout may be narrower than a step, so a step
//! is **gathered**: it has `cols / group` entries, and each entry is `group` consecutive positions.
//!
//! ```text
//! blocks of 16, tile of 64 rows, steps of 64:      a tile of 64 rows is four block rows;
//!   block row 4   . # . . # \                      the entries are the union of their blocks,
//!   block row 5   . # . . # # \                    masked ones first:
//!   block row 6   . # . . # # # \                      4  5  6  7 | 1  ·  ·  ·
//!   block row 7   . # . . # # # # \                    step 0       step 1, filled up
//! ```
//!
//! A mask of a plan covers a whole entry, `rows × group` bits. Masked entries and the padding entries of a step come first, then full ones, so a kernel applies
//! masks in the first steps only. Positions beyond a ragged end are 0 in the masks, so a kernel checks bounds only where it loads and stores.
//!
//! A tile's block rows are adjacent, or, in a *clustered* plan, similar rows from anywhere.
//!
//! A *coarse* plan does not gather. Its entries are whole steps of adjacent positions, with a bit per block that says whether the block row keeps it. The mask
//! of such an entry covers the pairs of kept blocks. Where a tile keeps nearly all blocks, this computes little extra, and a step is loaded and masked as a
//! whole.
//!
//! ```text
//! blocks of 16, tile of 64 rows, coarse steps of 64:
//!   block row 4   . # . . | # \ . .
//!   block row 5   . # . . | # # \ .        two entries of 4 × 4 bits, of which the second
//!   block row 6   . # . . | # # # \        has a mask of pairs, too
//!   block row 7   . # . . | # # # #
//! ```
//!
//! A pass over columns that adds to values its columns share (dQ) adds in a fixed order of tiles. Its plan counts
//! *visits*: the visit of an entry is the number of earlier tiles, in launch order, that have the same entry. A tile processes its entries
//! from the last to the first, so that concurrently running tiles meet in the same order everywhere: a tile that starts at a later diagonal does not wait for
//! one that has yet to arrive there. (Where a few tiles have far more entries than the others, all tiles run from the first to the last.)

mod cluster;
pub mod lines;
mod masks;
mod overhead;
mod source;
mod tiling;
mod visits;

use masks::TileMasks;
use source::Source;
use visits::{Visits, count_visits};

pub use overhead::{Grouping, NarrowCosts, tile_steps, tiling_overhead};
pub use tiling::{BIT_WORDS, EMPTY, LAST_VISIT, MASKED_STEP, Mainloop, NO_VISIT, Sections, Tiling};

use crate::BlockLayout;

/// Tiles, steps and masks of a launch over a layout, ready to upload.
#[derive(Clone, Debug)]
#[must_use]
pub struct TilePlan {
    /// Tiling of the layout.
    pub tiling: Tiling,
    /// Number of positions of an entry.
    pub group: usize,
    /// Number of tiles per head.
    pub tiles: usize,
    /// Words per row of a mask.
    pub mask_words: usize,
    /// All sections in one buffer.
    pub words: Vec<u32>,
    /// Offsets of the sections.
    pub sections: Sections,
    /// Number of steps of all heads of one batch entry (of all batch entries in a per-batch layout).
    pub steps: u64,
    /// Number of first tiles, in launch order, that count visits separately: see [`Tiling::apart`].
    pub apart: usize,
    /// In a plan with visits, the mean distance in launch order between a tile and the next one that shares columns with it. It is 1 if all tiles share some,
    /// and the number of documents if documents are equal. It is 0 if some tiles are much shorter than the preceding tiles, for which they would wait.
    pub between: usize,
    /// In a plan with visits, whether every group of columns has a visit in all patterns and no tiles count separately.
    pub complete: bool,
}

impl TilePlan {
    /// Cuts a layout, in O(kept blocks).
    ///
    /// # Panics
    /// - If `rows` or `cols` is neither a multiple nor a divisor of the block size.
    /// - If `places` is set and a tile is taller than a block.
    /// - If `clustered` is set and `rows` or `cols` is less than a block.
    /// - If `coarse` is set together with `places` or `clustered`, or where entries [cannot be coarse](Tiling::may_be_coarse).
    pub fn new(layout: &BlockLayout, tiling: Tiling) -> Self {
        check_fit(layout.block_size(), tiling);
        let Tiling { rows, cols, .. } = tiling;
        let [length, others] = tiling.mainloop.lengths(layout);
        let group = tiling.group(layout.block_size());
        let tiles = length.div_ceil(rows);
        let mut masks = TileMasks::new(layout, tiling, group);
        let mut cut = Tiles::default();
        let pattern_steps: Vec<u64> = (0..layout.num_patterns())
            .map(|pattern| cut.add(layout, tiling, pattern, tiles, &mut masks))
            .collect();
        let mut found = Visits::default();
        if tiling.visits {
            let sizes = visits::PlanSizes {
                tiles,
                per_step: cols / group,
                entry_words: tiling.entry_words(),
                others: others.div_ceil(group).max(1),
                apart: tiling.apart,
            };
            found = count_visits(&cut.records, &mut cut.entries, sizes);
            cut.order = found.order;
        }
        let heads = Heads::new(layout, tiles, &pattern_steps);

        let mut words = Vec::new();
        let mut section = |part: &[u32]| {
            let start = words.len();
            words.extend_from_slice(part);
            start
        };
        let sections = Sections {
            heads: section(&heads.firsts),
            places: section(&heads.places),
            order: section(&ranked_records(&cut.order, &cut.records, tiles)),
            rows: section(&cut.rows),
            tiles: section(&cut.records),
            entries: section(&cut.entries),
            masks: section(&masks.words),
        };
        Self {
            tiling,
            group,
            tiles,
            mask_words: masks.mask_words,
            words,
            sections,
            steps: heads.steps,
            apart: found.apart,
            between: found.between,
            complete: found.complete,
        }
    }

    /// Returns the number of steps of each pattern. The tiles of a pattern follow each other in [`words`](Self::words).
    pub fn pattern_steps(&self) -> Vec<usize> {
        let Sections { tiles, entries, .. } = self.sections;
        let records: Vec<&[u32]> = self.words[tiles..entries].chunks_exact(3).collect();
        let steps = |pattern: &[&[u32]]| pattern.iter().map(|record| record[1] as usize).sum();
        records.chunks(self.tiles.max(1)).map(steps).collect()
    }

    /// Returns the number of pairs that a launch computes, allowed or not, for one batch entry.
    pub fn computed_pairs(&self) -> u64 {
        self.steps * (self.tiling.rows * self.tiling.cols) as u64
    }
}

/// Returns whether a plan with visits has tiles that are much longer than the others, so that the others would wait for them at shared sums. `least` is a lower
/// bound of the mean number of steps of a tile.
pub fn has_long_tiles(layout: &BlockLayout, tiling: Tiling, least: f64) -> bool {
    let [_, others] = tiling.mainloop.lengths(layout);
    // Counting steps takes as long as a plan, so it is done only where steps may be few.
    if !visits::may_be_short(least, others.div_ceil(tiling.cols)) {
        return false;
    }
    let steps = tile_steps(layout, tiling);
    let tiles = steps.first().map_or(0, Vec::len);
    let mut totals: Vec<usize> = (0..tiles)
        .map(|tile| steps.iter().map(|steps| steps[tile]).sum())
        .collect();
    totals.sort_unstable_by_key(|&steps| std::cmp::Reverse(steps));
    visits::long_tiles(totals.into_iter(), steps.len()) > 0
}

/// # Panics
/// As [`TilePlan::new`].
fn check_fit(b: usize, tiling: Tiling) {
    let Tiling { rows, cols, .. } = tiling;
    assert!(
        [rows, cols]
            .iter()
            .all(|side| side.is_multiple_of(b) || b.is_multiple_of(*side)),
        "tiles of {rows} × {cols} do not fit blocks of {b}"
    );
    assert!(!tiling.places || rows <= b, "places need tiles in a block");
    assert!(
        !tiling.clustered || (rows >= b && cols >= b),
        "clusters need blocks in a tile"
    );
    let alone = !tiling.places && !tiling.clustered;
    assert!(
        !tiling.coarse || (alone && tiling.may_be_coarse(b)),
        "coarse entries need whole blocks in a tile of neighbours, and a bit for each"
    );
}

/// The tiles of all patterns: see [`Sections`].
#[derive(Default)]
struct Tiles {
    /// Tile indices only, without records.
    order: Vec<u32>,
    rows: Vec<u32>,
    records: Vec<u32>,
    entries: Vec<u32>,
}

impl Tiles {
    /// Adds the tiles of a pattern and returns their number of steps.
    fn add(
        &mut self,
        layout: &BlockLayout,
        tiling: Tiling,
        pattern: usize,
        tiles: usize,
        masks: &mut TileMasks,
    ) -> u64 {
        let b = layout.block_size();
        let group = tiling.group(b);
        let (per_step, entry_words) = (tiling.cols / group, tiling.entry_words());
        let source = Source::new(layout, tiling, pattern);
        self.rows.extend(source.clusters.iter().flatten());
        let mut steps_of = Vec::with_capacity(tiles);
        for tile in 0..tiles {
            let found = source.tile(tile, group, masks);
            let (words, masked_steps) = match tiling.visits {
                true => (found.in_visiting_order(per_step, tiling), 0),
                false => found.masked_first(per_step, tiling),
            };
            let first = self.entries.len() / entry_words;
            let steps = words.len() / entry_words / per_step;
            self.entries.extend(words);
            self.records
                .extend([first as u32, steps as u32, masked_steps as u32]);
            steps_of.push(steps);
        }
        let mut ranked: Vec<u32> = (0..tiles as u32).collect();
        // The sort is stable: equal tiles keep the order of the sequence, which shares keys in the cache.
        ranked.sort_by_key(|&tile| std::cmp::Reverse(steps_of[tile as usize]));
        self.order.extend(ranked);
        steps_of.iter().map(|&steps| steps as u64).sum()
    }
}

/// Values of a plan per head of all batch entries.
#[derive(Default)]
struct Heads {
    /// First tile record of each head.
    firsts: Vec<u32>,
    /// Index of each head's first block among the stored weights.
    places: Vec<u32>,
    /// Number of steps of all heads.
    steps: u64,
}

impl Heads {
    fn new(layout: &BlockLayout, tiles: usize, pattern_steps: &[u64]) -> Self {
        let mut heads = Self::default();
        for batch in 0..layout.batch().unwrap_or(1) {
            let mut place = 0;
            for head in 0..layout.heads() {
                let pattern = layout.pattern_of(batch, head);
                heads.firsts.push((pattern * tiles) as u32);
                heads.places.push(place as u32);
                place += layout.pattern_blocks(pattern);
                heads.steps += pattern_steps[pattern];
            }
        }
        heads
    }
}

/// Interleaves `order` with the tiles' records, so that a cube reads both at once.
fn ranked_records(order: &[u32], records: &[u32], tiles: usize) -> Vec<u32> {
    let mut ranked = Vec::with_capacity(order.len() * 4);
    for (index, &tile) in order.iter().enumerate() {
        let record = (index / tiles * tiles + tile as usize) * 3;
        ranked.push(tile);
        ranked.extend_from_slice(&records[record..record + 3]);
    }
    ranked
}

#[cfg(test)]
mod tests;
