//! Groups block rows with similar blocks into tiles.
//!
//! A tile of several block rows computes the union of their blocks. Where adjacent rows differ, the union is much larger than each row.
//! Grouping similar rows makes it small again:
//!
//! ```text
//! columns of fixed(128, 32), blocks of 32: every fourth is seen by all later queries
//!   neighbours   l l l S | l l l S | l l l S | …      every tile sees all later queries
//!   clusters     l l l l | l l l l | … | S S S S      a quarter of them does
//! ```
//!
//! Clusters are found greedily: a tile starts with the first remaining row, and repeatedly takes the nearby row that adds fewest masked pairs.

use super::tiling::Mainloop;
use crate::{BlockLayout, Run};

/// Number of rows in which a tile looks for its next row.
const WINDOW: usize = 256;
/// Buckets of each half of a [`Sketch`].
const BUCKETS: u64 = 256;

/// The blocks of a row as 512 bits. 256 bits are equal stretches of the sequence, which distinguish distant blocks, and 256 bits are
/// the block index modulo 256, which distinguish nearby blocks.
#[derive(Clone, Copy, Default)]
struct Sketch([u64; 8]);

impl Sketch {
    fn new(runs: &[Run], lines: usize) -> Self {
        let mut sketch = Self::default();
        let mut set = |bit: u64| sketch.0[(bit / 64) as usize] |= 1 << (bit % 64);
        for run in runs {
            // A long run is sampled: no more blocks than fill the buckets.
            let samples = run.count.min(2 * BUCKETS as u32);
            for sample in 0..u64::from(samples) {
                let index = sample * u64::from(run.count) / u64::from(samples);
                let far = u64::from(run.start) + index * u64::from(run.stride);
                let near = u64::from(run.start) + sample * u64::from(run.stride);
                set(far * BUCKETS / lines as u64);
                set(BUCKETS + near % BUCKETS);
            }
        }
        sketch
    }

    fn union(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    fn len(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }
}

/// Groups the block rows (or columns) of a head pattern into tiles of `height`. Missing rows of the last tile are filled with indices beyond the last row.
pub(crate) fn clusters(
    layout: &BlockLayout,
    mainloop: Mainloop,
    pattern: usize,
    height: usize,
) -> Vec<Vec<u32>> {
    let [lines, across] = mainloop.blocks(layout);
    let sketches: Vec<Sketch> = (0..lines)
        .map(|line| Sketch::new(mainloop.runs(layout, pattern, line), across))
        .collect();
    // The remaining rows as a linked list: `next[line]` follows `line - 1`, and `next[0]` is the first.
    let mut next: Vec<usize> = (0..=lines).collect();
    let mut beyond = lines as u32..;
    let mut tiles = Vec::with_capacity(lines.div_ceil(height));
    while next[0] < lines {
        let first = next[0];
        next[0] = next[first + 1];
        let mut tile = vec![first as u32];
        let mut union = sketches[first];
        while tile.len() < height && next[0] < lines {
            let mut best = (i64::MAX, 0);
            let mut before = 0;
            for _ in 0..WINDOW {
                let line = next[before];
                if line >= lines {
                    break;
                }
                let all = union.union(&sketches[line]).len() as i64;
                let vain = all * (tile.len() as i64 + 1) - i64::from(sketches[line].len());
                if vain < best.0 {
                    best = (vain, before);
                }
                before = line + 1;
            }
            let line = next[best.1];
            next[best.1] = next[line + 1];
            union = union.union(&sketches[line]);
            tile.push(line as u32);
        }
        // Sorted, so that tiles of adjacent rows keep their order.
        tile.sort_unstable();
        tile.extend(beyond.by_ref().take(height - tile.len()));
        tiles.push(tile);
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pattern;

    #[test]
    fn like_columns_share_a_tile() {
        let layout = Pattern::fixed(128, 32).layout(1, 2048, 32).unwrap();
        let tiles = clusters(&layout, Mainloop::Columns, 0, 4);
        assert_eq!(tiles.len(), 16);
        let mut all: Vec<u32> = tiles.concat();
        all.sort_unstable();
        assert_eq!(all, (0..64).collect::<Vec<u32>>());
        for like in [[3, 7, 11, 15], [19, 23, 27, 31], [35, 39, 43, 47]] {
            assert!(tiles.iter().any(|tile| tile[..] == like), "{tiles:?}");
        }
    }

    #[test]
    fn neighbours_that_are_alike_stay_together() {
        let layout = Pattern::local(256).layout(1, 1000, 32).unwrap();
        let tiles = clusters(&layout, Mainloop::Rows, 0, 4);
        let neighbours: Vec<Vec<u32>> = (0..8)
            .map(|tile| (4 * tile..4 * tile + 4).collect())
            .collect();
        assert_eq!(tiles, neighbours);
        // 33 rows of 8 are padded to 36.
        let ragged = Pattern::causal().layout(1, 260, 8).unwrap();
        let tiles = clusters(&ragged, Mainloop::Rows, 0, 4);
        assert_eq!(tiles.last().unwrap(), &vec![32, 33, 34, 35]);
    }
}
