//! [`TilePlan`]: what one kernel launch walks.
//!
//! A kernel computes tiles of `rows` queries (or keys, in the pass over columns) and for each walks
//! *steps* of `cols` keys (or queries). The blocks of a layout may be narrower than a step, so a step
//! is **gathered**: `cols / group` entries, each naming `group` consecutive positions, side by side.
//!
//! ```text
//! blocks of 16, tile of 64 rows, steps of 64:      a tile of 64 rows is four block rows;
//!   block row 4   . # . . # \                      the entries are the union of their blocks,
//!   block row 5   . # . . # # \                    masked ones first:
//!   block row 6   . # . . # # # \                      4  5  6  7 | 1  ·  ·  ·
//!   block row 7   . # . . # # # # \                    step 0       step 1, filled up
//! ```
//!
//! A mask of a plan covers a whole entry, `rows × group` bits. Entry order is masked entries (and those
//! that only fill up a step), then full ones, so that a kernel looks at masks in the first steps only.
//! Positions beyond a ragged end are 0 in the masks, so a kernel checks bounds only where it loads
//! and stores.
//!
//! A tile's own block rows are neighbours, or, in a *clustered* plan, rows with like blocks from anywhere.
//!
//! A pass over columns that adds to what its columns share (dQ) does so tile after tile. Its plan counts
//! *visits*: an entry's is the number of tiles before its own, in launch order, that have the same entry. So that tiles
//! which run side by side meet in the same order everywhere, a tile walks its entries from the last to the first: then a tile that
//! begins at a later diagonal does not wait for one that has yet to come there. (Where a few tiles have far more entries than the others, all
//! walk from the first to the last.)

use std::collections::HashMap;

use crate::cluster::clusters;
use crate::{BlockLayout, BlockMask, Entry, FULL};

/// Which side of the layout the tiles' rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Walk {
    /// Tiles of queries walk the keys they attend to: forward and dQ.
    Rows,
    /// Tiles of keys walk the queries that attend to them: dK and dV.
    Columns,
}

/// How a plan cuts a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Which side the rows are.
    pub walk: Walk,
    /// Positions of a tile.
    pub rows: usize,
    /// Positions of a step.
    pub cols: usize,
    /// Whether entries say where their block's stored weights are. Then a tile lies within one block row.
    pub places: bool,
    /// Whether a tile's block rows are chosen to be alike. Otherwise they are neighbours.
    pub clustered: bool,
    /// Whether entries say how many tiles before theirs have the same entry: the order in which tiles add to what they
    /// share. Then all patterns share one order of tiles, and entries are in the order in which a tile should walk.
    pub visits: bool,
}

impl Tiling {
    /// Words of an entry.
    pub fn entry_words(&self) -> usize {
        2 + usize::from(self.places || self.visits)
    }
}

/// The visit of an entry that only fills up a step.
pub const NO_VISIT: u32 = u32::MAX >> 1;
/// Bit of the visit of a step's first entry: the masks of this step matter.
pub const MASKED_STEP: u32 = 1 << 31;

/// Mask id of an entry without any pair, which fills up a step. Id 0 is the full entry.
pub(crate) const EMPTY: u32 = 1;

/// Where the parts of [`TilePlan::words`] begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    /// `[batch | 1, heads]`: the first of the tile records of this head's pattern.
    pub heads: usize,
    /// `[batch | 1, heads]`: the place of the head's first block among the stored weights.
    pub places: usize,
    /// `[patterns, tiles, 4]`: tile indices, those with most steps first, each with the tile's record.
    pub order: usize,
    /// `[patterns · tiles, rows / block]`: the block rows of each tile of a clustered plan, beyond the last where there
    /// are too few. Empty otherwise.
    pub rows: usize,
    /// `[patterns · tiles, 3]`: first entry, steps, steps whose masks matter.
    pub tiles: usize,
    /// `[entries, 2]` or with places or visits `[entries, 3]`: position / group, mask id, place or visit.
    pub entries: usize,
    /// `[masks, rows, mask_words]`, bit `c % 32` of word `c / 32` is column `c`.
    pub masks: usize,
}

/// Tiles, steps and masks for a launch over a layout, ready to upload.
#[derive(Clone, Debug)]
pub struct TilePlan {
    /// How the layout was cut.
    pub tiling: Tiling,
    /// Positions an entry names.
    pub group: usize,
    /// Tiles per head.
    pub tiles: usize,
    /// Words of a mask's row.
    pub mask_words: usize,
    /// Everything, in one buffer.
    pub words: Vec<u32>,
    /// Where its parts begin.
    pub sections: Sections,
    /// Steps over all heads of one batch entry (of all, in a per-batch layout).
    pub steps: u64,
}

impl TilePlan {
    /// Cuts a layout. O(kept blocks).
    ///
    /// # Panics
    /// If `rows` or `cols` is neither a multiple nor a divisor of the block size, if places are asked
    /// for and a tile is taller than a block, or if clusters are and `rows` or `cols` is less than a block.
    pub fn new(layout: &BlockLayout, tiling: Tiling) -> Self {
        let b = layout.block_size();
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
        let length = match tiling.walk {
            Walk::Rows => layout.seq_q(),
            Walk::Columns => layout.seq_kv(),
        };
        let group = cols.min(b);
        let mut masks = TileMasks::new(layout, tiling, group);
        let tiles = length.div_ceil(rows);
        let per_step = cols / group;
        let entry_words = tiling.entry_words();

        let mut order = Vec::with_capacity(layout.num_patterns() * tiles);
        let mut records: Vec<u32> = Vec::with_capacity(layout.num_patterns() * tiles * 3);
        let mut entries: Vec<u32> = Vec::new();
        let mut pattern_steps = Vec::new();
        let mut tile_rows = Vec::new();
        for pattern in 0..layout.num_patterns() {
            let source = Source::new(layout, tiling, pattern);
            let clusters = match tiling.clustered {
                true => clusters(layout, tiling.walk, pattern, rows / b),
                false => Vec::new(),
            };
            tile_rows.extend(clusters.iter().flatten());
            let mut steps_of = Vec::with_capacity(tiles);
            for tile in 0..tiles {
                let mut found = match clusters.get(tile) {
                    Some(lines) => source.union(lines, group, &mut masks),
                    None => source.tile(tile, group, &mut masks),
                };
                let first = entries.len() / entry_words;
                if tiling.visits {
                    let words = found.walk(per_step);
                    let steps = words.len() / entry_words / per_step;
                    entries.extend(words);
                    records.extend([first as u32, steps as u32, 0]);
                    steps_of.push(steps);
                    continue;
                }
                let masked = found.masked.len();
                let filler = (masked + found.full.len()).next_multiple_of(per_step)
                    - (masked + found.full.len());
                let fill = [TileEntry {
                    at: 0,
                    mask: EMPTY,
                    place: 0,
                }];
                let all = (fill.iter().cycle().take(filler))
                    .chain(&found.masked)
                    .chain(&found.full);
                for entry in all {
                    entries.extend([entry.at, entry.mask]);
                    if tiling.places {
                        entries.push(entry.place);
                    }
                }
                let steps = (entries.len() / entry_words - first) / per_step;
                let masked_steps = (filler + masked).div_ceil(per_step);
                records.extend([first as u32, steps as u32, masked_steps as u32]);
                steps_of.push(steps);
            }
            let mut ranked: Vec<u32> = (0..tiles as u32).collect();
            // Stable: among equals the order of the sequence, which shares keys in the cache.
            ranked.sort_by_key(|&tile| std::cmp::Reverse(steps_of[tile as usize]));
            order.extend(ranked);
            pattern_steps.push(steps_of.iter().map(|&s| s as u64).sum::<u64>());
        }
        if tiling.visits {
            let others = match tiling.walk {
                Walk::Rows => layout.seq_kv(),
                Walk::Columns => layout.seq_q(),
            };
            let shape = Shape {
                tiles,
                per_step,
                others: others.div_ceil(group).max(1),
            };
            order = count_visits(&records, &mut entries, shape);
        }

        let batches = layout.batch().unwrap_or(1);
        let mut heads = Vec::new();
        let mut places = Vec::new();
        let mut steps = 0;
        for batch in 0..batches {
            let mut place = 0;
            for head in 0..layout.heads() {
                let pattern = layout.pattern_of(batch, head);
                heads.push((pattern * tiles) as u32);
                places.push(place as u32);
                place += layout.pattern_blocks(pattern);
                steps += pattern_steps[pattern];
            }
        }

        let mut words = Vec::new();
        let mut section = |part: &[u32]| {
            let start = words.len();
            words.extend_from_slice(part);
            start
        };
        let sections = Sections {
            heads: section(&heads),
            places: section(&places),
            order: section(&ranked_records(&order, &records, tiles)),
            rows: section(&tile_rows),
            tiles: section(&records),
            entries: section(&entries),
            masks: section(&masks.words),
        };
        Self {
            tiling,
            group,
            tiles,
            mask_words: masks.mask_words,
            words,
            sections,
            steps,
        }
    }

    /// The pairs that a launch computes, allowed or not, for one batch entry.
    pub fn computed_pairs(&self) -> u64 {
        self.steps * (self.tiling.rows * self.tiling.cols) as u64
    }
}

/// `order` with each tile's record behind it, so that a cube reads both at once.
fn ranked_records(order: &[u32], records: &[u32], tiles: usize) -> Vec<u32> {
    let mut ranked = Vec::with_capacity(order.len() * 4);
    for (index, &tile) in order.iter().enumerate() {
        let record = (index / tiles * tiles + tile as usize) * 3;
        ranked.push(tile);
        ranked.extend_from_slice(&records[record..record + 3]);
    }
    ranked
}

struct Shape {
    tiles: usize,
    per_step: usize,
    /// Groups of columns there are.
    others: usize,
}

/// One order of tiles for all patterns, those with most steps first, and in it the visits of all entries.
fn count_visits(records: &[u32], entries: &mut [u32], shape: Shape) -> Vec<u32> {
    let Shape {
        tiles,
        per_step,
        others,
    } = shape;
    let steps = |record: usize| records[record * 3 + 1] as usize;
    let patterns = records.len() / 3 / tiles.max(1);
    let total = |tile: usize| -> usize { (0..patterns).map(|p| steps(p * tiles + tile)).sum() };
    let mut ranked: Vec<u32> = (0..tiles as u32).collect();
    ranked.sort_by_key(|&tile| std::cmp::Reverse(total(tile as usize)));
    for pattern in 0..patterns {
        let record = |rank: usize| pattern * tiles + ranked[rank] as usize;
        // A tile that most queries see, as that of attention sinks, is far from done with the last of them when the
        // others are. Then all begin at their first queries: the long tile keeps ahead, and nobody waits until it has come to
        // the end of a window.
        let longest_and_usual =
            (tiles > 0).then(|| [0, tiles / 16].map(|rank| steps(record(rank))));
        let forward = longest_and_usual.is_some_and(|[longest, usual]| longest > 4 * usual);
        let mut visits = vec![0u32; others];
        for record in (0..tiles).map(record) {
            let first = records[record * 3] as usize * 3;
            let length = steps(record) * per_step * 3;
            let words = &mut entries[first..first + length];
            if forward {
                reverse_steps(words, per_step * 3);
            }
            for entry in words.chunks_exact_mut(3) {
                if entry[2] & NO_VISIT != NO_VISIT {
                    let visit = &mut visits[entry[0] as usize];
                    entry[2] |= *visit;
                    *visit += 1;
                }
            }
        }
    }
    let order = std::iter::repeat_n(ranked, patterns);
    order.flatten().collect()
}

fn reverse_steps(words: &mut [u32], step: usize) {
    let steps = words.len() / step;
    for low in 0..steps / 2 {
        let (front, back) = words.split_at_mut((steps - 1 - low) * step);
        front[low * step..(low + 1) * step].swap_with_slice(&mut back[..step]);
    }
}

/// One entry of a tile.
struct TileEntry {
    at: u32,
    mask: u32,
    place: u32,
}

#[derive(Default)]
struct TileEntries {
    masked: Vec<TileEntry>,
    full: Vec<TileEntry>,
}

impl TileEntries {
    /// Appends the slices of a block of `b`, each `group` wide, with the masks at their columns.
    fn push(
        &mut self,
        block: u32,
        b: usize,
        group: usize,
        place: u32,
        mut mask_at: impl FnMut(usize) -> u32,
    ) {
        for slice in 0..b / group {
            let entry = TileEntry {
                at: block * (b / group) as u32 + slice as u32,
                mask: mask_at(slice * group),
                place,
            };
            match entry.mask {
                FULL => self.full.push(entry),
                EMPTY => {}
                _ => self.masked.push(entry),
            }
        }
    }

    /// The words of a tile's entries without their visits: from the last to the first, filled up at the end.
    fn walk(&mut self, per_step: usize) -> Vec<u32> {
        let mut all: Vec<TileEntry> = self.masked.drain(..).chain(self.full.drain(..)).collect();
        all.sort_by_key(|entry| std::cmp::Reverse(entry.at));
        let mut words = Vec::with_capacity(all.len().next_multiple_of(per_step) * 3);
        for step in all.chunks(per_step) {
            let masked = step.len() < per_step || step.iter().any(|entry| entry.mask != FULL);
            let flag = if masked { MASKED_STEP } else { 0 };
            for (k, entry) in step.iter().enumerate() {
                words.extend([entry.at, entry.mask, if k == 0 { flag } else { 0 }]);
            }
            for _ in step.len()..per_step {
                words.extend([0, EMPTY, NO_VISIT]);
            }
        }
        words
    }
}

/// One side of one head pattern.
struct Source<'a> {
    layout: &'a BlockLayout,
    tiling: Tiling,
    pattern: usize,
    /// With places, in a pass over columns: the places of each column's blocks.
    column_places: Vec<Vec<u32>>,
}

impl<'a> Source<'a> {
    fn new(layout: &'a BlockLayout, tiling: Tiling, pattern: usize) -> Self {
        let mut column_places = Vec::new();
        if tiling.places && tiling.walk == Walk::Columns {
            column_places = vec![Vec::new(); layout.kv_blocks()];
            let mut place = 0;
            for q_block in 0..layout.q_blocks() {
                for entry in layout.row(pattern, q_block) {
                    column_places[entry.block as usize].push(place);
                    place += 1;
                }
            }
        }
        Self {
            layout,
            tiling,
            pattern,
            column_places,
        }
    }

    fn line(&self, block: usize) -> Vec<Entry> {
        match self.tiling.walk {
            Walk::Rows => self.layout.row(self.pattern, block),
            Walk::Columns => self.layout.column(self.pattern, block),
        }
    }

    fn lines(&self) -> usize {
        match self.tiling.walk {
            Walk::Rows => self.layout.q_blocks(),
            Walk::Columns => self.layout.kv_blocks(),
        }
    }

    /// The entries of a tile of neighbours.
    fn tile(&self, tile: usize, group: usize, masks: &mut TileMasks) -> TileEntries {
        let b = self.layout.block_size();
        let rows = self.tiling.rows;
        let first = tile * rows / b;
        if rows > b {
            let lines: Vec<u32> = (first..first + rows / b).map(|line| line as u32).collect();
            return self.union(&lines, group, masks);
        }
        let mut found = TileEntries::default();
        let start = match self.tiling.walk {
            Walk::Rows => self.layout.row_offsets(self.pattern)[first] as u32,
            Walk::Columns => 0,
        };
        for (k, entry) in self.line(first).into_iter().enumerate() {
            let place = match self.column_places.get(first) {
                Some(places) => places[k],
                None => start + k as u32,
            };
            found.push(entry.block, b, group, place, |col| {
                masks.intern(&[entry.mask], tile * rows % b, col)
            });
        }
        found
    }

    /// The entries of a tile of these block rows, merged.
    fn union(&self, lines: &[u32], group: usize, masks: &mut TileMasks) -> TileEntries {
        let b = self.layout.block_size();
        let mut found = TileEntries::default();
        let height = lines.len();
        let lines: Vec<Vec<Entry>> = lines
            .iter()
            .map(|&line| match (line as usize) < self.lines() {
                true => self.line(line as usize),
                false => Vec::new(),
            })
            .collect();
        let mut next = vec![0; height];
        let mut ids = vec![ABSENT; height];
        loop {
            let heads = lines.iter().zip(&next).filter_map(|(line, &k)| line.get(k));
            let Some(block) = heads.map(|entry| entry.block).min() else {
                return found;
            };
            for ((line, k), id) in lines.iter().zip(&mut next).zip(&mut ids) {
                *id = match line.get(*k) {
                    Some(entry) if entry.block == block => {
                        *k += 1;
                        entry.mask
                    }
                    _ => ABSENT,
                };
            }
            found.push(block, b, group, 0, |col| masks.intern(&ids, 0, col));
        }
    }
}

/// Stands for the mask of a block that one of a tile's block rows does not keep.
const ABSENT: u32 = u32::MAX;

/// The distinct masks of a plan's entries.
struct TileMasks<'a> {
    table: &'a [BlockMask],
    tiling: Tiling,
    group: usize,
    mask_words: usize,
    words: Vec<u32>,
    /// By the layout's masks and the offsets into them.
    known: HashMap<(Vec<u32>, usize, usize), u32>,
    /// By content.
    distinct: HashMap<Vec<u32>, u32>,
}

impl<'a> TileMasks<'a> {
    fn new(layout: &'a BlockLayout, tiling: Tiling, group: usize) -> Self {
        let mask_words = group.div_ceil(32);
        let mut masks = Self {
            table: layout.masks(),
            tiling,
            group,
            mask_words,
            words: Vec::new(),
            known: HashMap::new(),
            distinct: HashMap::new(),
        };
        let ones = u32::MAX >> (32 - group.min(32));
        for (id, word) in [(FULL, ones), (EMPTY, 0)] {
            let row = vec![word; tiling.rows * mask_words];
            masks.words.extend_from_slice(&row);
            masks.distinct.insert(row, id);
        }
        masks
    }

    /// The mask of an entry: `ids`, one per block row of the tile, from row `row_offset` and column
    /// `col_offset` of the block on.
    fn intern(&mut self, ids: &[u32], row_offset: usize, col_offset: usize) -> u32 {
        if ids.iter().all(|&id| id == FULL) {
            return FULL;
        }
        let key = (ids.to_vec(), row_offset, col_offset);
        if let Some(&id) = self.known.get(&key) {
            return id;
        }
        let Tiling { walk, rows, .. } = self.tiling;
        let height = rows / ids.len();
        let mut bits = vec![0u32; rows * self.mask_words];
        for row in 0..rows {
            let id = ids[row / height];
            if id == ABSENT {
                continue;
            }
            let mask = &self.table[id as usize];
            for col in 0..self.group {
                let (r, c) = (row % height + row_offset, col + col_offset);
                let allowed = match walk {
                    Walk::Rows => mask.get(r, c),
                    Walk::Columns => mask.get(c, r),
                };
                if allowed {
                    bits[row * self.mask_words + col / 32] |= 1 << (col % 32);
                }
            }
        }
        let fresh = self.distinct.len() as u32;
        let id = match self.distinct.get(&bits) {
            Some(&id) => id,
            None => {
                self.words.extend_from_slice(&bits);
                self.distinct.insert(bits, fresh);
                fresh
            }
        };
        self.known.insert(key, id);
        id
    }
}

/// Columns' worth of time that a tile takes before its first and after its last step.
pub(crate) const START: f64 = 64.0;

/// The time tiles of `rows` rows and steps of `cols` columns take, relative to computing nothing but the pairs in kept blocks:
/// what the union of block rows, the filling up of steps, and the tiles' beginnings add. From a sample of the
/// tiles. With `clustered` tiles are made of like rows.
pub fn tiling_overhead(layout: &BlockLayout, tiling: Tiling) -> f64 {
    /// Blocks looked at per launch; small layouts have fewer.
    const ENOUGH: usize = 1 << 16;
    if let Some(choice) = layout.device_choice() {
        return choice.overhead(layout.shape(), tiling);
    }
    let Tiling {
        walk,
        rows,
        cols,
        clustered,
        ..
    } = tiling;
    let b = layout.block_size();
    // A tile lower than a block has its row of blocks to itself.
    let height = (rows / b).max(1);
    let (mut computed, mut kept) = (0.0, 0);
    let per_pattern = ENOUGH.div_ceil(layout.num_patterns());
    for pattern in 0..layout.num_patterns() {
        let source = Source {
            layout,
            tiling,
            pattern,
            column_places: Vec::new(),
        };
        let clusters = match clustered {
            true => clusters(layout, walk, pattern, height),
            false => Vec::new(),
        };
        let tiles = source.lines().div_ceil(height);
        let mut seen = 0;
        for tile in scattered(tiles) {
            let lines = match clusters.get(tile) {
                Some(lines) => lines.clone(),
                None => ((tile * height) as u32..).take(height).collect(),
            };
            let mut blocks: Vec<u32> = lines
                .into_iter()
                .filter(|&line| (line as usize) < source.lines())
                .flat_map(|line| source.line(line as usize))
                .map(|entry| entry.block)
                .collect();
            kept += blocks.len();
            seen += blocks.len();
            if height > 1 {
                blocks.sort_unstable();
                blocks.dedup();
            }
            let width = (blocks.len() * b).next_multiple_of(cols.max(b));
            if width > 0 {
                computed += (width as f64 + START) * height as f64;
            }
            if seen > per_pattern {
                break;
            }
        }
    }
    if kept == 0 {
        return 1.0;
    }
    computed / (kept * b) as f64
}

/// All numbers below `count`, neighbours far apart: any first few are a sample, of periodic things, too.
fn scattered(count: usize) -> impl Iterator<Item = usize> {
    let coprime = |step: &usize| {
        let (mut a, mut b) = (*step, count);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a == 1
    };
    let golden = (count as f64 * 0.618) as usize + 1;
    let step = (golden..).find(coprime).unwrap_or(1);
    (0..count).map(move |index| index * step % count)
}

/// How block rows are best put into tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grouping {
    /// See [`tiling_overhead`].
    pub overhead: f64,
    /// Whether tiles are clustered.
    pub clustered: bool,
}

impl Grouping {
    /// Clusters like rows where neighbours are unlike and that is allowed.
    pub fn best(
        layout: &BlockLayout,
        walk: Walk,
        [rows, cols]: [usize; 2],
        may_cluster: bool,
    ) -> Self {
        /// What clusters have to save: their rows are gathered.
        const WORTHWHILE: f64 = 1.1;
        let [neighbours, like] = [false, true].map(|clustered| Tiling {
            walk,
            rows,
            cols,
            places: false,
            clustered,
            visits: false,
        });
        let overhead = tiling_overhead(layout, neighbours);
        let b = layout.block_size();
        let of_blocks = Tiling {
            rows: b,
            ..neighbours
        };
        if may_cluster
            && rows > b
            && cols >= b
            && overhead > WORTHWHILE * tiling_overhead(layout, of_blocks)
        {
            let clustered = tiling_overhead(layout, like);
            if clustered * WORTHWHILE < overhead {
                return Self {
                    overhead: clustered,
                    clustered: true,
                };
            }
        }
        Self {
            overhead,
            clustered: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pattern;

    /// The pairs of a plan are exactly those of the layout, once each.
    #[rstest::rstest]
    #[case(Pattern::fixed(12, 3), 8, 64, 32)]
    #[case(Pattern::causal(), 128, 64, 32)]
    #[case(Pattern::causal(), 16, 16, 64)]
    #[case(Pattern::merged_strided(9), 32, 64, 64)]
    #[case(Pattern::fixed_heads(16, 4, 2), 16, 8, 8)]
    fn plans_allow_what_the_layout_allows(
        #[case] pattern: Pattern,
        #[case] block: usize,
        #[case] rows: usize,
        #[case] cols: usize,
        #[values(Walk::Rows, Walk::Columns)] walk: Walk,
        #[values(false, true)] places: bool,
        #[values(false, true)] clustered: bool,
    ) {
        if (places && rows > block) || (clustered && (rows < block || cols < block)) {
            return;
        }
        let layout = pattern.layout(4, 187, block).unwrap();
        let tiling = Tiling {
            walk,
            rows,
            cols,
            places,
            clustered,
            visits: false,
        };
        let plan = TilePlan::new(&layout, tiling);
        let Sections {
            heads,
            order,
            tiles,
            entries,
            masks,
            rows: tile_rows,
            ..
        } = plan.sections;
        let width = 2 + usize::from(places);
        let per_step = cols / plan.group;
        for head in 0..4 {
            let dense = layout.to_dense(head);
            let mut seen = vec![vec![0; 187]; 187];
            let first_tile = plan.words[heads + head] as usize;
            let mut ranks: Vec<u32> = plan.words[order + first_tile * 4..][..plan.tiles * 4]
                .chunks(4)
                .map(|ranked| {
                    let record = tiles + (first_tile + ranked[0] as usize) * 3;
                    assert_eq!(ranked[1..], plan.words[record..record + 3]);
                    ranked[0]
                })
                .collect();
            ranks.sort_unstable();
            assert_eq!(ranks, (0..plan.tiles as u32).collect::<Vec<_>>());
            for tile in 0..plan.tiles {
                let record = tiles + (first_tile + tile) * 3;
                let [first, steps, masked] =
                    [0, 1, 2].map(|field| plan.words[record + field] as usize);
                for entry in 0..steps * per_step {
                    let at = entries + (first + entry) * width;
                    let (position, mask) = (plan.words[at] as usize, plan.words[at + 1] as usize);
                    if entry / per_step >= masked {
                        assert_eq!(mask, 0, "a masked entry after the masked steps");
                    }
                    for row in 0..rows {
                        let mut place = tile * rows + row;
                        if clustered {
                            let at = tile_rows + (first_tile + tile) * (rows / block) + row / block;
                            place = plan.words[at] as usize * block + row % block;
                        }
                        for col in 0..plan.group {
                            let word = masks + (mask * rows + row) * plan.mask_words + col / 32;
                            if plan.words[word] >> (col % 32) & 1 == 1 {
                                let (r, c) = (place, position * plan.group + col);
                                let (i, j) = match walk {
                                    Walk::Rows => (r, c),
                                    Walk::Columns => (c, r),
                                };
                                seen[i][j] += 1;
                            }
                        }
                    }
                }
            }
            for i in 0..187 {
                for j in 0..187 {
                    assert_eq!(
                        seen[i][j],
                        u32::from(dense[i][j]),
                        "head {head}, ({i}, {j})"
                    );
                }
            }
        }
    }

    fn tiling(rows: usize, cols: usize, clustered: bool) -> Tiling {
        Tiling {
            walk: Walk::Columns,
            rows,
            cols,
            places: false,
            clustered,
            visits: false,
        }
    }

    /// In launch order, tiles count the visits of each group of columns without a gap, whatever the pattern.
    #[rstest::rstest]
    #[case(Pattern::causal(), 16, 64)]
    #[case(Pattern::streaming(40, 3), 8, 128)]
    #[case(Pattern::fixed_heads(16, 4, 2), 16, 64)]
    #[case(Pattern::local(30), 128, 64)]
    fn visits_count_in_launch_order(
        #[case] pattern: Pattern,
        #[case] block: usize,
        #[case] cols: usize,
        #[values(false, true)] clustered: bool,
    ) {
        if clustered && cols < block {
            return;
        }
        let layout = pattern.layout(4, 700, block).unwrap();
        let tiling = Tiling {
            walk: Walk::Columns,
            rows: 128,
            cols,
            places: false,
            visits: true,
            clustered,
        };
        let plan = TilePlan::new(&layout, tiling);
        let sections = plan.sections;
        let per_step = cols / plan.group;
        let order = |head: usize| {
            let first = plan.words[sections.heads + head] as usize;
            let ranked = plan.words[sections.order + first * 4..][..plan.tiles * 4].chunks(4);
            ranked.map(|ranked| ranked[0]).collect::<Vec<_>>()
        };
        for head in 0..4 {
            assert_eq!(order(head), order(0), "heads may share a tile of keys");
            let first = plan.words[sections.heads + head] as usize;
            let mut visits: HashMap<u32, u32> = HashMap::new();
            let mut pairs = 0;
            for tile in order(head) {
                let record = sections.tiles + (first + tile as usize) * 3;
                let steps = plan.words[record + 1] as usize;
                for j in 0..steps {
                    let at = plan.words[record] as usize + j * per_step;
                    let words = &plan.words[sections.entries + at * 3..][..per_step * 3];
                    let masked = words.chunks(3).any(|entry| entry[1] != FULL);
                    assert_eq!(words[2] & MASKED_STEP != 0, masked);
                    for entry in words.chunks(3) {
                        if entry[2] & NO_VISIT == NO_VISIT {
                            assert_eq!(entry[1], EMPTY);
                            continue;
                        }
                        let visit = visits.entry(entry[0]).or_default();
                        assert_eq!(entry[2] & NO_VISIT, *visit);
                        *visit += 1;
                        let rows = 128 * plan.mask_words;
                        let mask = &plan.words[sections.masks + entry[1] as usize * rows..][..rows];
                        pairs += mask.iter().map(|word| word.count_ones()).sum::<u32>();
                    }
                }
            }
            let dense = layout.to_dense(head);
            let kept: usize = dense.iter().flatten().filter(|&&kept| kept).count();
            assert_eq!(pairs as usize, kept, "head {head}");
        }
    }

    /// Windows are walked from their last queries on, unless a tile of sinks is long and keeps ahead from the first ones on.
    #[rstest::rstest]
    #[case(Pattern::local(256), false)]
    #[case(Pattern::causal(), false)]
    #[case(Pattern::streaming(256, 64), true)]
    fn long_tiles_turn_all_walks(#[case] pattern: Pattern, #[case] forward: bool) {
        let layout = pattern.layout(1, 8192, 64).unwrap();
        let tiling = Tiling {
            visits: true,
            ..tiling(128, 64, false)
        };
        let plan = TilePlan::new(&layout, tiling);
        let sections = plan.sections;
        for tile in 0..plan.tiles {
            let record = &plan.words[sections.tiles + tile * 3..][..3];
            let entries = &plan.words[sections.entries + record[0] as usize * 3..];
            let places = entries[..record[1] as usize * 3].chunks(3);
            let places: Vec<u32> = places.map(|entry| entry[0]).collect();
            let sorted = match forward {
                true => places.is_sorted(),
                false => places.is_sorted_by(|a, b| a >= b),
            };
            assert!(sorted, "tile {tile}: {places:?}");
        }
    }

    #[test]
    fn overheads_count_unions_filling_and_beginnings() {
        let shared = Pattern::dense().layout(1, 256, 16).unwrap();
        assert_eq!(
            tiling_overhead(&shared, tiling(64, 16, false)),
            (256.0 + START) / 256.0
        );
        let diagonal = Pattern::local(1).layout(1, 256, 16).unwrap();
        // Four blocks where one is kept, then a step that is three quarters empty.
        assert_eq!(
            tiling_overhead(&diagonal, tiling(64, 16, false)),
            (64.0 + START) / 16.0
        );
        assert_eq!(
            tiling_overhead(&diagonal, tiling(16, 64, false)),
            (64.0 + START) / 16.0
        );
        let none = BlockLayout::from_block_fn("none", *diagonal.shape(), |_, _, _| None).unwrap();
        assert_eq!(tiling_overhead(&none, tiling(64, 64, false)), 1.0);
    }

    #[test]
    fn scattered_numbers_are_all_numbers() {
        for count in [1, 2, 3, 10, 64, 96, 1000] {
            let mut all: Vec<usize> = scattered(count).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..count), "{count}");
        }
        assert_eq!(scattered(0).count(), 0);
    }

    #[test]
    fn unlike_neighbours_are_clustered() {
        let fixed = Pattern::fixed(128, 32).layout(1, 4096, 32).unwrap();
        let neighbours = tiling_overhead(&fixed, tiling(128, 64, false));
        let grouping = Grouping::best(&fixed, Walk::Columns, [128, 64], true);
        assert!(grouping.clustered && grouping.overhead < neighbours / 2.0);
        let refused = Grouping::best(&fixed, Walk::Columns, [128, 64], false);
        assert_eq!((refused.overhead, refused.clustered), (neighbours, false));
        // All rows are alike.
        assert!(!Grouping::best(&fixed, Walk::Rows, [128, 64], true).clustered);
    }
}
