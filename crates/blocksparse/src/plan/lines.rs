//! [`LinePlan`]: the blocks of a layout, ordered by the columns or diagonals on which they lie.
//!
//! A kernel that sums over columns or diagonals does not sum whole lines in one place. Blocks are cut into square
//! *tiles*. The tiles of a line of tiles are added element by element, and only the total is split into positions:
//!
//! ```text
//! tiles of 4, a diagonal of tiles:   0 1 2 3        element (r, c) of the sum is of the position's
//!                                  0 3 2 1 0        diagonal 3 + r − c, counted from the tile's
//!                                  1 4 3 2 1        upper right corner: 2 · 4 − 1 sums
//!                                  2 5 4 3 2
//!                                  3 6 5 4 3        a column of tiles: column c, 4 sums
//! ```
//!
//! Long lines are cut into *segments* of several tiles for parallelism. A position's sum is the sum of its segments, in order. Memory is O(kept blocks / tiles
//! of a segment).

use std::collections::HashMap;
use std::ops::Range;

use crate::layout::MaskInterner;
use crate::{BlockLayout, BlockMask, FULL};

/// Direction of the lines that are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Line {
    /// All queries of a key.
    Columns,
    /// All pairs of a query and a key at the same distance.
    Diagonals,
}

/// Parameters by which a layout is cut into lines.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lines {
    /// Direction of the lines.
    pub line: Line,
    /// Side of a tile in positions; divides the block size.
    pub side: usize,
    /// Queries that are included.
    pub queries: Range<usize>,
    /// Maximum number of segments of a head.
    pub most_segments: usize,
}

/// Number of tiles of a segment, unless that makes too many segments.
const SEGMENT: usize = 32;

/// Offsets of the sections of [`LinePlan::words`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineSections {
    /// `[batch | 1, heads, 3]`: first line, first segment and number of segments of the head.
    pub heads: usize,
    /// `[patterns, lines + 1]`: number of the pattern's segments before each line.
    pub lines: usize,
    /// `[segments, 2]`: first tile and number of tiles.
    pub segments: usize,
    /// `[tiles, 3]`: key tile, mask id, query tile.
    pub tiles: usize,
    /// `[masks, side, mask_words]`: bit `c % 32` of word `c / 32` is column `c`. Mask 0 is full.
    pub masks: usize,
}

/// The tiles of every line, ready to upload.
#[derive(Clone, Debug)]
#[must_use]
pub struct LinePlan {
    /// All sections in one buffer.
    pub words: Vec<u32>,
    /// Offsets of the sections.
    pub sections: LineSections,
    /// Maximum number of segments of a head.
    pub segments: usize,
    /// Number of lines of tiles.
    pub lines: usize,
}

impl LinePlan {
    /// Cuts a layout, in O(kept blocks).
    ///
    /// # Panics
    /// If the side does not divide the block size.
    pub fn new(layout: &BlockLayout, lines: &Lines) -> Self {
        let side = lines.side;
        assert!(
            layout.block_size().is_multiple_of(side),
            "tiles of {side} do not fit blocks of {}",
            layout.block_size()
        );
        let [q_tiles, kv_tiles] = [layout.seq_q(), layout.seq_kv()].map(|n| n.div_ceil(side));
        let count = match lines.line {
            Line::Columns => kv_tiles,
            Line::Diagonals => q_tiles + kv_tiles - 1,
        };
        let mut masks = LineMasks::new(layout, side);
        let patterns: Vec<Vec<Vec<[u32; 3]>>> = (0..layout.num_patterns())
            .map(|pattern| tiles_of(layout, pattern, lines, count, &mut masks))
            .collect();
        let segment = segment_length(&patterns, lines.most_segments);

        let (mut firsts, mut segments, mut tiles) = (Vec::new(), Vec::new(), Vec::new());
        // First line, first segment and number of segments of each pattern.
        let mut records: Vec<[u32; 3]> = Vec::new();
        for pattern in &patterns {
            let (first_line, first_segment) = (firsts.len(), segments.len() / 2);
            for line in pattern {
                firsts.push((segments.len() / 2 - first_segment) as u32);
                for part in line.chunks(segment) {
                    segments.extend([(tiles.len() / 3) as u32, part.len() as u32]);
                    tiles.extend(part.iter().flatten());
                }
            }
            let length = segments.len() / 2 - first_segment;
            firsts.push(length as u32);
            records.push([first_line as u32, first_segment as u32, length as u32]);
        }
        let mut heads = Vec::new();
        for batch in 0..layout.batch().unwrap_or(1) {
            for head in 0..layout.heads() {
                heads.extend(records[layout.pattern_of(batch, head)]);
            }
        }

        let mut words = Vec::new();
        let mut section = |part: &[u32]| {
            let start = words.len();
            words.extend_from_slice(part);
            start
        };
        let sections = LineSections {
            heads: section(&heads),
            lines: section(&firsts),
            segments: section(&segments),
            tiles: section(&tiles),
            masks: section(&masks.words()),
        };
        Self {
            words,
            sections,
            segments: records.iter().map(|r| r[2] as usize).max().unwrap_or(0),
            lines: count,
        }
    }
}

/// Returns the number of tiles of a segment such that no pattern has more than `most` segments, or the minimum of one segment per line.
fn segment_length(patterns: &[Vec<Vec<[u32; 3]>>], most: usize) -> usize {
    let longest = patterns.iter().flatten().map(Vec::len).max().unwrap_or(0);
    let segments = |length: usize| {
        let of = |pattern: &Vec<Vec<_>>| pattern.iter().map(|l| l.len().div_ceil(length)).sum();
        patterns.iter().map(of).max().unwrap_or(0usize)
    };
    let mut length = SEGMENT;
    while segments(length) > most && length < longest {
        length *= 2;
    }
    length
}

/// Returns the tiles of each line of a pattern.
fn tiles_of(
    layout: &BlockLayout,
    pattern: usize,
    lines: &Lines,
    count: usize,
    masks: &mut LineMasks,
) -> Vec<Vec<[u32; 3]>> {
    let (b, side) = (layout.block_size(), lines.side);
    let kv_tiles = layout.seq_kv().div_ceil(side);
    let per_block = b / side;
    let mut found = vec![Vec::new(); count];
    for q_tile in lines.queries.start / side..lines.queries.end.div_ceil(side) {
        let first = q_tile * side;
        let rows = lines.queries.start.max(first) - first
            ..lines.queries.end.min(first + side).saturating_sub(first);
        for entry in layout.row(pattern, first / b) {
            for column in 0..per_block {
                let part = [q_tile % per_block, column];
                let Some(mask) = masks.part(entry.mask, part, rows.clone()) else {
                    continue;
                };
                let k_tile = entry.block as usize * per_block + column;
                let line = match lines.line {
                    Line::Columns => k_tile,
                    Line::Diagonals => q_tile + kv_tiles - 1 - k_tile,
                };
                found[line].push([k_tile as u32, mask, q_tile as u32]);
            }
        }
    }
    found
}

/// The masks of tiles, each computed once.
struct LineMasks<'a> {
    layout: &'a BlockLayout,
    side: usize,
    known: HashMap<(u32, [usize; 2], Range<usize>), Option<u32>>,
    masks: MaskInterner,
}

impl<'a> LineMasks<'a> {
    fn new(layout: &'a BlockLayout, side: usize) -> Self {
        Self {
            layout,
            side,
            known: HashMap::new(),
            masks: MaskInterner::new(side),
        }
    }

    /// Returns the mask of the tile at `[row, column]` of a block with `mask`, restricted to `rows`. `None` if no pair is left.
    fn part(&mut self, mask: u32, [row, column]: [usize; 2], rows: Range<usize>) -> Option<u32> {
        let side = self.side;
        if mask == FULL && rows == (0..side) {
            return Some(FULL);
        }
        let block = &self.layout.masks()[mask as usize];
        let masks = &mut self.masks;
        let key = (mask, [row, column], rows.clone());
        *self.known.entry(key).or_insert_with(|| {
            let allowed = |r: usize, c: usize| {
                rows.contains(&r) && block.get(row * side + r, column * side + c)
            };
            masks.intern(BlockMask::from_fn(side, allowed))
        })
    }

    fn words(self) -> Vec<u32> {
        let side = self.side;
        let word = |mask: &BlockMask, row: usize, word: usize| {
            (0..side.min(32)).fold(0, |bits, bit| {
                bits | u32::from(mask.get(row, word * 32 + bit)) << bit
            })
        };
        let masks = self.masks.into_masks();
        let rows = masks
            .iter()
            .flat_map(|mask| (0..side).map(move |row| (mask, row)));
        rows.flat_map(|(mask, row)| (0..side.div_ceil(32)).map(move |at| word(mask, row, at)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{LayoutShape, Pattern};

    /// Every allowed pair of the included queries is in exactly one tile, on its line, and no other pair is in any tile.
    #[rstest]
    #[case(Pattern::causal(), [75, 75, 16], 16, 0..75)]
    #[case(Pattern::merged_strided(7), [50, 90, 32], 8, 0..50)]
    #[case(Pattern::per_head([Pattern::strided(5), Pattern::dense()]), [90, 41, 64], 32, 0..90)]
    #[case(Pattern::streaming(20, 3), [130, 130, 32], 16, 61..90)]
    #[case(Pattern::local(9), [64, 64, 8], 8, 63..64)]
    fn plans_have_the_pairs_of_the_queries(
        #[case] pattern: Pattern,
        #[case] sizes: [usize; 3],
        #[case] side: usize,
        #[case] queries: Range<usize>,
        #[values(Line::Columns, Line::Diagonals)] line: Line,
        #[values(3, 65_535)] most_segments: usize,
    ) {
        let [seq_q, seq_kv, block_size] = sizes;
        let shape = LayoutShape::new(2, [seq_q, seq_kv], block_size);
        let layout = BlockLayout::new(&pattern, shape).unwrap();
        let lines = Lines {
            line,
            side,
            queries: queries.clone(),
            most_segments,
        };
        let LinePlan {
            words,
            sections,
            lines,
            ..
        } = LinePlan::new(&layout, &lines);
        let word = |at: usize| words[at] as usize;
        for head in 0..2 {
            let mut dense = layout.to_dense(head);
            for (query, row) in dense.iter_mut().enumerate() {
                row.iter_mut()
                    .for_each(|on| *on &= queries.contains(&query));
            }
            let record = sections.heads + head * 3;
            let firsts = sections.lines + word(record);
            assert_eq!(word(firsts + lines), word(record + 2));
            for at in 0..lines {
                for segment in word(firsts + at)..word(firsts + at + 1) {
                    let segment = sections.segments + (word(record + 1) + segment) * 2;
                    for tile in word(segment)..word(segment) + word(segment + 1) {
                        let tile = sections.tiles + tile * 3;
                        let (k_tile, mask, q_tile) = (word(tile), word(tile + 1), word(tile + 2));
                        let expected = match line {
                            Line::Columns => k_tile,
                            Line::Diagonals => q_tile + seq_kv.div_ceil(side) - 1 - k_tile,
                        };
                        assert_eq!(at, expected);
                        for (r, c) in (0..side).flat_map(|r| (0..side).map(move |c| (r, c))) {
                            let bits = sections.masks + (mask * side + r) * side.div_ceil(32);
                            if words[bits + c / 32] >> (c % 32) & 1 == 1 {
                                let pair = &mut dense[q_tile * side + r][k_tile * side + c];
                                assert!(*pair, "once");
                                *pair = false;
                            }
                        }
                    }
                }
            }
            assert!(!dense.iter().flatten().any(|&on| on), "pairs are missing");
        }
    }
}
