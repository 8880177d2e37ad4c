//! Builds the blocks of a pattern row by row from its zones.

use std::collections::HashMap;

use super::BlockLayout;
use super::mask::{BlockMask, FULL, MaskInterner};
use super::rows::{RowRuns, Run};
use super::shape::LayoutShape;
use crate::LayoutError;
use crate::pattern::{BlockRow, Cell, Cells, Pattern, document, document_start};

/// Maximum number of cached masks: enough for every distance that repeats.
const MAX_REMEMBERED: usize = 1 << 14;

/// Cached masks of full-size blocks of the repeating parts of a pattern. The key is the part (by its address), the phase of its period, and the distance
/// between query and key.
type MaskCache = HashMap<(usize, i64, i64), BlockMask>;

/// A block of a head: positions of its first query and key, and its numbers of queries and keys.
#[derive(Clone, Copy)]
struct Place {
    head: usize,
    i0: i64,
    j0: i64,
    rows: usize,
    columns: usize,
}

/// Geometry of a layout under construction: positions and ragged edges.
pub(crate) struct Grid {
    pub shape: LayoutShape,
    /// Query row `r` sits at position `r + offset`.
    offset: i64,
}

impl Grid {
    pub fn new(shape: LayoutShape) -> Self {
        Self {
            shape,
            offset: shape.seq_kv as i64 - shape.seq_q as i64,
        }
    }

    pub fn q_blocks(&self) -> usize {
        self.shape.seq_q.div_ceil(self.shape.block_size)
    }

    pub fn kv_blocks(&self) -> usize {
        self.shape.seq_kv.div_ceil(self.shape.block_size)
    }

    /// Returns the number of queries in block row `q_block`. The last row may be shorter.
    pub fn rows_in(&self, q_block: usize) -> usize {
        (self.shape.seq_q - q_block * self.shape.block_size).min(self.shape.block_size)
    }

    /// Returns the number of keys in block column `kv_block`. The last column may be shorter.
    pub fn columns_in(&self, kv_block: usize) -> usize {
        (self.shape.seq_kv - kv_block * self.shape.block_size).min(self.shape.block_size)
    }

    fn row(&self, q_block: usize) -> BlockRow {
        let b = self.shape.block_size;
        let first = (q_block * b) as i64 + self.offset;
        BlockRow {
            first,
            last: first + self.rows_in(q_block) as i64 - 1,
            block_size: b as i64,
            kv_blocks: self.kv_blocks() as i64,
        }
    }

    /// Returns the mask of a block whose pairs inside the sequences are all allowed: full unless the block is on a ragged edge.
    pub fn full(&self, q_block: usize, kv_block: usize, masks: &mut MaskInterner) -> Option<u32> {
        let (b, rows, columns) = (
            self.shape.block_size,
            self.rows_in(q_block),
            self.columns_in(kv_block),
        );
        match rows == b && columns == b {
            true => Some(FULL),
            false => masks.intern(BlockMask::corner(b, rows, columns)),
        }
    }

    /// Computes the mask of a block from `attends`, with as few calls as the pattern allows.
    fn evaluate(
        &self,
        pattern: &Pattern,
        head: usize,
        q_block: usize,
        kv_block: usize,
        known: &mut MaskCache,
    ) -> BlockMask {
        let b = self.shape.block_size;
        let (i0, j0) = ((q_block * b) as i64 + self.offset, (kv_block * b) as i64);
        let (rows, columns) = (self.rows_in(q_block), self.columns_in(kv_block));
        let block = Place {
            head,
            i0,
            j0,
            rows,
            columns,
        };
        let mask = self.whole(pattern, block, known);
        match rows < b || columns < b {
            true => mask.combine(&BlockMask::corner(b, rows, columns), |x, y| x & y),
            false => mask,
        }
    }

    /// Computes the mask of a block. Pairs beyond the sequence are arbitrary: a cached mask covers them as if the sequence had no end, and a callback is not
    /// called for them.
    fn whole(&self, pattern: &Pattern, block: Place, known: &mut MaskCache) -> BlockMask {
        let b = self.shape.block_size;
        let Place { head, i0, j0, .. } = block;
        let mut combined = |parts: &[Pattern], op: fn(u64, u64) -> u64| {
            let mut masks = parts.iter();
            let first = masks.next().expect("a validated pattern has parts");
            let first = self.whole(first, block, known);
            masks.fold(first, |mask, part| {
                mask.combine(&self.whole(part, block, known), op)
            })
        };
        match pattern {
            Pattern::Union(parts) => return combined(parts, |x, y| x | y),
            Pattern::Intersection(parts) => return combined(parts, |x, y| x & y),
            Pattern::PerHead(parts) => {
                return self.whole(&parts[head % parts.len()], block, known);
            }
            Pattern::Packed { starts, pattern } => {
                let own = document(starts, i0);
                let ends = [i0 + b as i64 - 1, j0, j0 + b as i64 - 1];
                if ends.iter().all(|&p| document(starts, p) == own) {
                    let start = document_start(starts, own);
                    let inside = Place {
                        i0: i0 - start,
                        j0: j0 - start,
                        ..block
                    };
                    return self.whole(pattern, inside, known);
                }
            }
            _ => {}
        }
        if pattern.row_bits(head, i0, j0, b).is_some() {
            let bits = |r| pattern.row_bits(head, i0 + r as i64, j0, b).unwrap_or(0);
            return BlockMask::from_rows(b, bits);
        }
        let attends = |r: usize, c: usize| pattern.attends(head, i0 + r as i64, j0 + c as i64);
        let Some(period) = pattern.shift_period() else {
            let there = |r, c| r < block.rows && c < block.columns;
            return BlockMask::from_fn(b, |r, c| there(r, c) && attends(r, c));
        };
        // A part of a pattern keeps its address while the layout is built.
        let part = std::ptr::from_ref(pattern) as usize;
        let key = (part, i0.rem_euclid(period), i0 - j0);
        if let Some(mask) = known.get(&key) {
            return mask.clone();
        }
        let mask = BlockMask::from_fn(b, attends);
        if known.len() < MAX_REMEMBERED {
            known.insert(key, mask.clone());
        }
        mask
    }

    /// Interns the mask from [`Self::evaluate`].
    fn mixed(
        &self,
        pattern: &Pattern,
        head: usize,
        block: (usize, usize),
        masks: &mut MaskInterner,
        known: &mut MaskCache,
    ) -> Option<u32> {
        let (q_block, kv_block) = block;
        masks.intern(self.evaluate(pattern, head, q_block, kv_block, known))
    }

    /// Builds all block rows of `head` from the pattern's zones.
    pub fn build(&self, pattern: &Pattern, head: usize, masks: &mut MaskInterner) -> RowRuns {
        let mut rows = RowRuns::new();
        let mut known = MaskCache::new();
        let kv_blocks = self.kv_blocks();
        // A ragged last key block differs from all others, so it gets its own zone.
        let ragged_column =
            (self.columns_in(kv_blocks - 1) < self.shape.block_size).then_some(kv_blocks - 1);
        for q_block in 0..self.q_blocks() {
            let mut start = 0;
            for zone in pattern.zones(head, &self.row(q_block)) {
                let end = zone.end as usize;
                let split = ragged_column.filter(|&c| c + 1 == end).unwrap_or(end);
                for (start, end) in [(start, split), (split, end)] {
                    let mut emit = |cell: Cell, start: usize, stride: usize, count: usize| {
                        let mask = match cell {
                            Cell::Empty => None,
                            Cell::Full => self.full(q_block, start, masks),
                            Cell::Mixed => {
                                self.mixed(pattern, head, (q_block, start), masks, &mut known)
                            }
                        };
                        if let Some(mask) = mask {
                            rows.push(Run {
                                start: start as u32,
                                stride: stride as u32,
                                count: count as u32,
                                mask,
                            });
                        }
                    };
                    expand(&zone.cells, start, end, &mut emit);
                }
                start = end;
            }
            rows.end_row();
        }
        rows
    }
}

/// Calls `emit(cell, start, stride, count)` for each group of blocks of `start..end` with equal masks.
fn expand(
    cells: &Cells,
    start: usize,
    end: usize,
    emit: &mut impl FnMut(Cell, usize, usize, usize),
) {
    match cells {
        _ if start >= end => {}
        Cells::Same(cell) => emit(*cell, start, 1, end - start),
        Cells::Each => (start..end).for_each(|block| emit(Cell::Mixed, block, 1, 1)),
        Cells::Cycle(cycle) => {
            let period = cycle.len();
            for first in start..end.min(start + period) {
                let count = (end - 1 - first) / period + 1;
                emit(cycle[first % period], first, period, count);
            }
        }
    }
}

/// Builds the layout of a pattern block by block in natural order.
pub(super) fn natural_layout(
    pattern: &Pattern,
    shape: LayoutShape,
) -> Result<BlockLayout, LayoutError> {
    shape.validate()?;
    pattern.validate(shape.heads)?;
    let grid = Grid::new(shape);
    let mut masks = MaskInterner::new(shape.block_size);
    let distinct = pattern.head_period().unwrap_or(shape.heads);
    let rows = (0..distinct.min(shape.heads))
        .map(|head| grid.build(pattern, head, &mut masks))
        .collect();
    let name = pattern.to_string();
    Ok(BlockLayout::from_heads(name, shape, rows, masks))
}

/// Builds a layout whose head `h` has pattern `heads[h]`, or no blocks.
pub(super) fn layout_by_head(
    heads: &[Option<Pattern>],
    shape: LayoutShape,
) -> Result<BlockLayout, LayoutError> {
    let grid = Grid::new(shape);
    let mut masks = MaskInterner::new(shape.block_size);
    let mut rows = Vec::with_capacity(heads.len());
    let mut names = Vec::with_capacity(heads.len());
    for (head, pattern) in heads.iter().enumerate() {
        rows.push(match pattern {
            Some(pattern) => {
                pattern.validate(shape.heads)?;
                grid.build(pattern, head, &mut masks)
            }
            None => RowRuns::empty(grid.q_blocks()),
        });
        names.push(match pattern {
            Some(pattern) => pattern.to_string(),
            None => "nothing".into(),
        });
    }
    names.dedup();
    let name = format!("per_head({})", names.join(", "));
    Ok(BlockLayout::from_heads(name, shape, rows, masks))
}
