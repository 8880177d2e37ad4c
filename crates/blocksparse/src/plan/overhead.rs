//! Estimates the overhead of a tiling before a plan is made.

use super::source::Source;
use super::tiling::{Mainloop, Tiling};
use crate::arith::gcd;
use crate::layout::TALLEST;
use crate::{BlockLayout, BlockSource, DeviceChoice, Entry, FULL, LayoutShape};

/// Time that a tile takes before its first and after its last step, in columns.
const START: f64 = 64.0;

/// Returns the estimated time of tiles of `rows` rows and steps of `cols` columns, relative to computing only the pairs in kept blocks. The overhead is the
/// union of block rows, the padding of steps, and the prologue of tiles. A sample of the tiles is used. With `clustered`, tiles consist of similar rows.
pub fn tiling_overhead(layout: &BlockLayout, tiling: Tiling) -> f64 {
    match layout.device_choice() {
        // Uses all blocks of the enclosing layout.
        Some(choice) => match layout.places() {
            Some(places) if may_be_chosen(tiling, layout.block_size()) => {
                Sample::of(places, tiling).overhead(layout.block_size())
            }
            _ => chosen_overhead(choice, layout.shape(), tiling),
        },
        None => Sample::of(layout, tiling).overhead(layout.block_size()),
    }
}

/// Statistics of some tiles of a layout.
#[derive(Default)]
struct Sample {
    /// Columns of all block rows of the tiles, including the padding of steps and the prologue of tiles.
    computed: f64,
    /// Number of kept blocks.
    kept: usize,
    tiles: usize,
    /// Number of entries of the tiles.
    entries: usize,
    /// Number of entries in which some block row does not keep all pairs.
    masked: usize,
    /// Number of entries with a block that is kept with only some of its pairs.
    partial: usize,
}

impl Sample {
    fn overhead(&self, b: usize) -> f64 {
        match self.kept {
            0 => 1.0,
            kept => self.computed / (kept * b) as f64,
        }
    }

    /// Returns the share of all entries.
    fn share(&self, entries: usize) -> f64 {
        entries as f64 / self.entries.max(1) as f64
    }

    /// Samples a layout whose blocks are known on the host.
    fn of(layout: &BlockLayout, tiling: Tiling) -> Self {
        /// Number of blocks to examine per launch; small layouts have fewer.
        const ENOUGH: usize = 1 << 16;
        let (cols, b) = (tiling.cols, layout.block_size());
        let height = tiling.height(layout);
        let per_entry = match tiling.coarse {
            true => cols / b,
            false => 1,
        };
        let mut sample = Self::default();
        let per_pattern = ENOUGH.div_ceil(layout.num_patterns());
        for pattern in 0..layout.num_patterns() {
            let source = Source::new(layout, tiling.without_places(), pattern);
            let count = source.lines().div_ceil(height);
            let mut seen = 0;
            for tile in scattered(count) {
                let blocks: Vec<Entry> = source.blocks(tile).collect();
                seen += blocks.len();
                sample.add(blocks, height, per_entry, b, cols);
                if seen > per_pattern {
                    break;
                }
            }
        }
        sample
    }

    /// Adds a tile of `height` block rows with all their blocks.
    fn add(&mut self, blocks: Vec<Entry>, height: usize, per_entry: usize, b: usize, cols: usize) {
        self.tiles += 1;
        self.kept += blocks.len();
        let places = blocks.iter().map(|entry| entry.block / per_entry as u32);
        let mut entries: Vec<(u32, bool)> = places
            .zip(blocks.iter().map(|entry| entry.mask == FULL))
            .collect();
        if height > 1 || per_entry > 1 {
            entries.sort_unstable();
        }
        let same = entries.chunk_by(|(one, _), (other, _)| one == other);
        let mut found = 0;
        for entry in same {
            found += 1;
            let partial = entry.iter().any(|&(_, full)| !full);
            self.partial += usize::from(partial);
            self.masked += usize::from(partial || entry.len() < height * per_entry);
        }
        self.entries += found;
        let width = (found * per_entry * b).next_multiple_of(cols.max(b));
        if width > 0 {
            self.computed += (width as f64 + START) * height as f64;
        }
    }
}

/// Returns the number of steps of the tiles of each pattern, as a plan has them if masks remove no entries.
pub fn tile_steps(layout: &BlockLayout, tiling: Tiling) -> Vec<Vec<usize>> {
    let Tiling { rows, cols, .. } = tiling;
    let b = layout.block_size();
    let [_, others] = tiling.mainloop.blocks(layout);
    let of_pattern = |pattern| -> Vec<usize> {
        let source = Source::new(layout, tiling.without_places(), pattern);
        // The last tile that contained each block.
        let mut met = vec![usize::MAX; others];
        let mut of_tile = |tile: usize| {
            let mut blocks = 0;
            for entry in source.blocks(tile) {
                let last = std::mem::replace(&mut met[entry.block as usize], tile);
                blocks += usize::from(last != tile);
            }
            (blocks * b).div_ceil(cols)
        };
        let count = (source.lines() * b).div_ceil(rows);
        (0..count).map(&mut of_tile).collect()
    };
    (0..layout.num_patterns()).map(of_pattern).collect()
}

/// Returns whether a plan of blocks that a device chooses supports a tiling.
fn may_be_chosen(tiling: Tiling, b: usize) -> bool {
    (tiling.rows / b).max(1) <= TALLEST && !tiling.clustered
}

/// Estimates [`tiling_overhead`] where a device chooses the blocks and only sizes are known. Rows are assumed to share no blocks.
fn chosen_overhead(choice: &DeviceChoice, shape: &LayoutShape, tiling: Tiling) -> f64 {
    let b = shape.block_size;
    if !may_be_chosen(tiling, b) {
        return f64::INFINITY;
    }
    let height = (tiling.rows / b).max(1);
    let kept = match choice.by {
        // A guess: a quarter of the blocks is kept.
        BlockSource::Mask => choice.most_blocks(shape).div_ceil(4),
        _ => choice.most_blocks(shape).max(1),
    };
    let width = (height * kept * b).next_multiple_of(tiling.cols.max(b));
    (width as f64 + START) / (kept * b) as f64
}

/// Iterates over all numbers below `count` so that neighbours are far apart: any prefix is a fair sample, even of periodic data.
fn scattered(count: usize) -> impl Iterator<Item = usize> {
    let coprime = |&step: &usize| gcd(step as i64, count as i64) == 1;
    let golden = (count as f64 * 0.618) as usize + 1;
    let step = (golden..).find(coprime).unwrap_or(1);
    (0..count).map(move |index| index * step % count)
}

/// The best grouping of block rows into tiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grouping {
    /// See [`tiling_overhead`].
    pub overhead: f64,
    /// True if tiles are clustered.
    pub clustered: bool,
}

impl Grouping {
    /// Chooses between adjacent and similar rows. Similar rows are clustered only if that is allowed and worthwhile.
    pub fn best(
        layout: &BlockLayout,
        mainloop: Mainloop,
        [rows, cols]: [usize; 2],
        may_cluster: bool,
    ) -> Self {
        /// Minimum gain from clusters, whose rows are gathered.
        const WORTHWHILE: f64 = 1.1;
        let [neighbours, like] = [false, true].map(|clustered| Tiling {
            clustered,
            ..Tiling::new(mainloop, rows, cols)
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

/// Costs of steps over narrow blocks, relative to steps of adjacent positions without masks.
#[derive(Clone, Copy, Debug)]
pub struct NarrowCosts {
    /// Cost of steps gathered from narrow blocks.
    pub gathered: f64,
    /// Extra cost if all steps have masks, in blocks of 16 and of 32.
    pub masked: [f64; 2],
    /// Cost of coarse steps with their bits.
    pub coarse: f64,
}

impl NarrowCosts {
    /// Returns whether mainloops over a layout may have coarse steps: its blocks are narrow and known on the host.
    pub fn concern(layout: &BlockLayout) -> bool {
        matches!(layout.block_size(), 16 | 32) && layout.device_choice().is_none()
    }

    /// Returns the time of gathered tiles in the units of [`tiling_overhead`], including masks.
    pub fn of_gathered(&self, layout: &BlockLayout, tiling: Tiling) -> f64 {
        let sample = Sample::of(layout, tiling);
        let b = layout.block_size();
        let masked = self.masked[usize::from(b > 16)];
        sample.overhead(b) * self.gathered * (1.0 + masked * sample.share(sample.masked))
    }

    /// Returns the time of coarse tiles in the same units. `None` if coarse steps are impossible, if mainloops are too short for steps to dominate, or if
    /// element masks take too much memory for one per entry.
    pub fn of_coarse(&self, layout: &BlockLayout, tiling: Tiling) -> Option<f64> {
        /// Minimum columns of a tile with a long mainloop.
        const LONG: usize = 1024;
        /// Maximum bytes of masks.
        const MOST: f64 = (32 << 20) as f64;
        let b = layout.block_size();
        if !Self::concern(layout) || !tiling.may_be_coarse(b) {
            return None;
        }
        let sample = Sample::of(layout, tiling);
        let long = sample.entries * tiling.cols >= LONG * sample.tiles;
        let [length, _] = tiling.mainloop.lengths(layout);
        let tiles = length.div_ceil(tiling.rows) * layout.num_patterns();
        let masks = sample.partial as f64 * tiles as f64 / sample.tiles.max(1) as f64;
        let few = masks * (tiling.rows * tiling.cols / 8) as f64 <= MOST;
        let masked = self.masked[usize::from(b > 16)];
        let factor = self.coarse * (1.0 + masked * sample.share(sample.partial));
        (long && few).then(|| sample.overhead(b) * factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pattern;

    fn tiling(rows: usize, cols: usize, clustered: bool) -> Tiling {
        Tiling {
            clustered,
            ..Tiling::new(Mainloop::Columns, rows, cols)
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
        // The union is four blocks where one is kept; in the second case a step is three quarters empty.
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
        let grouping = Grouping::best(&fixed, Mainloop::Columns, [128, 64], true);
        assert!(grouping.clustered && grouping.overhead < neighbours / 2.0);
        let refused = Grouping::best(&fixed, Mainloop::Columns, [128, 64], false);
        assert_eq!((refused.overhead, refused.clustered), (neighbours, false));
        // All rows have the same blocks.
        assert!(!Grouping::best(&fixed, Mainloop::Rows, [128, 64], true).clustered);
    }

    #[test]
    fn coarse_steps_are_for_long_mainloops_over_nearly_everything() {
        let costs = NarrowCosts {
            gathered: 1.1,
            masked: [0.5, 0.5],
            coarse: 1.0,
        };
        let of = |pattern: Pattern, b: usize, clustered: bool| {
            let layout = pattern.layout(1, 8192, b).unwrap();
            let gathered = tiling(128, 64, clustered);
            let coarse = Tiling {
                coarse: true,
                ..tiling(128, 64, false)
            };
            let before = costs.of_gathered(&layout, gathered);
            (before, costs.of_coarse(&layout, coarse))
        };
        // Both have the same steps, of which about one in thirty has masks.
        let (gathered, coarse) = of(Pattern::causal(), 16, false);
        let coarse = coarse.unwrap();
        assert!(
            gathered > 1.05 * coarse && gathered < 1.15 * coarse,
            "{gathered} {coarse}"
        );
        // All later queries see one column of four, which clusters separate.
        let (gathered, coarse) = of(Pattern::fixed(128, 32), 32, true);
        assert!(coarse.is_none_or(|coarse| coarse > gathered));
        assert!(of(Pattern::local(256), 16, false).1.is_none(), "short");
        assert!(of(Pattern::causal(), 64, false).1.is_none(), "wide");
        assert!(
            of(Pattern::causal(), 8, false).1.is_none(),
            "more than 64 bits"
        );
    }
}
