//! What a tiling computes in vain, estimated before it is made.

use super::cluster::clusters;
use super::source::Source;
use super::tiling::{Tiling, Walk};
use crate::layout::TALLEST;
use crate::{BlockLayout, ChosenBy, DeviceChoice, LayoutShape};

/// Columns' worth of time that a tile takes before its first and after its last step.
const START: f64 = 64.0;

/// The time tiles of `rows` rows and steps of `cols` columns take, relative to computing nothing but the pairs in kept blocks:
/// what the union of block rows, the filling up of steps, and the tiles' beginnings add. From a sample of the
/// tiles. With `clustered` tiles are made of like rows.
pub fn tiling_overhead(layout: &BlockLayout, tiling: Tiling) -> f64 {
    /// Blocks looked at per launch; small layouts have fewer.
    const ENOUGH: usize = 1 << 16;
    if let Some(choice) = layout.device_choice() {
        return chosen_overhead(choice, layout.shape(), tiling);
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
        let source = Source::without_places(layout, tiling, pattern);
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

/// Steps of the tiles of each pattern, as a plan has them but for what masks leave out.
#[cfg(feature = "cuda-asm")]
pub fn tile_steps(layout: &BlockLayout, tiling: Tiling) -> Vec<Vec<usize>> {
    let Tiling {
        walk,
        rows,
        cols,
        clustered,
        ..
    } = tiling;
    let b = layout.block_size();
    let height = (rows / b).max(1);
    let of_pattern = |pattern| -> Vec<usize> {
        let source = Source::without_places(layout, tiling, pattern);
        let clusters = match clustered {
            true => clusters(layout, walk, pattern, height),
            false => Vec::new(),
        };
        let tiles = (source.lines() * b).div_ceil(rows);
        let of_tile = |tile: usize| {
            let lines = match clusters.get(tile) {
                Some(lines) => lines.clone(),
                None => ((tile * rows / b) as u32..).take(height).collect(),
            };
            let mut blocks: Vec<u32> = lines
                .into_iter()
                .filter(|&line| (line as usize) < source.lines())
                .flat_map(|line| source.line(line as usize))
                .map(|entry| entry.block)
                .collect();
            blocks.sort_unstable();
            blocks.dedup();
            (blocks.len() * b).div_ceil(cols)
        };
        (0..tiles).map(of_tile).collect()
    };
    (0..layout.num_patterns()).map(of_pattern).collect()
}

/// [`tiling_overhead`] where a device chooses the blocks and only sizes are known: rows are taken to share nothing.
fn chosen_overhead(choice: &DeviceChoice, shape: &LayoutShape, tiling: Tiling) -> f64 {
    let b = shape.block_size;
    let height = (tiling.rows / b).max(1);
    if height > TALLEST || tiling.clustered {
        return f64::INFINITY;
    }
    let kept = match choice.by {
        // A guess.
        ChosenBy::Mask => choice.most_blocks(shape).div_ceil(4),
        _ => choice.most_blocks(shape).max(1),
    };
    let width = (height * kept * b).next_multiple_of(tiling.cols.max(b));
    (width as f64 + START) / (kept * b) as f64
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
