//! How a pattern cuts one row of blocks into stretches whose blocks are known to look alike.
//!
//! A layout must be built in time proportional to the blocks it keeps, so nobody may look at every
//! pair. Instead each pattern describes a block row as *zones*: consecutive key blocks over which the
//! mask of a block depends only on `block mod period`. One block of each residue class then stands
//! for all of them, and its mask comes from [`Pattern::attends`], the definition. A pattern that says
//! too little here (`Each`) costs time. There are two ways to be wrong: a zone that claims too much, and a
//! `shift_period` that does not hold, since a mask evaluated once is remembered by distance and phase. The
//! tests compare random layouts with `attends` pair by pair and find both.
//!
//! ```text
//! fixed(128, 32), block size 32, block row 14 (positions 448..480):
//! key block   0  1  2  3  4  5  6  7  8  9 10 11 | 12 13 | 14 | 15 ..
//! zone        Cycle [Empty, Empty, Empty, Full]  | Full  | Each | Empty
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use super::Pattern;
use super::attends::{document, document_start, is_in, is_in_group};
use crate::arith::{gcd, lcm};

/// What is known of a block before its pairs are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    Empty,
    Full,
    /// Some pairs may be allowed: ask `attends`.
    Mixed,
}

/// The blocks of a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cells {
    /// All have the same mask.
    Same(Cell),
    /// Block `J` has the mask of every other block of the zone that equals it modulo the length.
    Cycle(Vec<Cell>),
    /// Nothing is known: look at each block.
    Each,
}

/// Blocks from the previous zone's end up to `end` (exclusive).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub end: i64,
    pub cells: Cells,
}

/// One row of blocks: the positions of its queries, and the key blocks it can see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRow {
    /// Position of the first query.
    pub first: i64,
    /// Position of the last query (inclusive; the last row may be ragged).
    pub last: i64,
    pub block_size: i64,
    pub kv_blocks: i64,
}

impl BlockRow {
    /// The first key block that is not entirely at or before the first query.
    fn diagonal(&self) -> i64 {
        self.clamp((self.first + 1).div_euclid(self.block_size))
    }

    /// One past the last key block that starts at or before the last query.
    fn causal_end(&self) -> i64 {
        self.clamp(self.last.div_euclid(self.block_size) + 1)
    }

    fn clamp(&self, block: i64) -> i64 {
        block.clamp(0, self.kv_blocks)
    }

    fn all(&self, cells: Cells) -> Vec<Zone> {
        vec![Zone {
            end: self.kv_blocks,
            cells,
        }]
    }

    /// Zones of a pattern whose query `p` sees the keys `low(p)..=high(p)`, both non-decreasing in `p`.
    fn interval(&self, low: impl Fn(i64) -> i64, high: impl Fn(i64) -> i64) -> Vec<Zone> {
        let b = self.block_size;
        let block_of = |position: i64| position.div_euclid(b);
        // Blocks with any pair, and blocks inside the interval of every query of the row.
        let any_start = self.clamp(block_of(low(self.first)));
        let any_end = self.clamp(block_of(high(self.last)) + 1).max(any_start);
        let full_start = block_of(low(self.last) + b - 1).clamp(any_start, any_end);
        let full_end = block_of(high(self.first) + 1).clamp(full_start, any_end);
        self.zones([
            (any_start, Cells::Same(Cell::Empty)),
            (full_start, Cells::Each),
            (full_end, Cells::Same(Cell::Full)),
            (any_end, Cells::Each),
            (self.kv_blocks, Cells::Same(Cell::Empty)),
        ])
    }

    /// Zones of a causal pattern that is periodic in the keys: `cycle` before the diagonal.
    fn periodic(&self, cycle: Vec<Cell>) -> Vec<Zone> {
        let diagonal = self.diagonal();
        self.zones([
            (diagonal, Cells::Cycle(cycle)),
            (self.causal_end().max(diagonal), Cells::Each),
            (self.kv_blocks, Cells::Same(Cell::Empty)),
        ])
    }

    /// Zones of a pattern that is empty but for the key positions `first..after` of each mark, of which all pairs are allowed
    /// (`Full`) or some may be (`Mixed`).
    fn marked(&self, marks: impl IntoIterator<Item = (i64, i64, Cell)>) -> Vec<Zone> {
        let b = self.block_size;
        let mut cells: BTreeMap<i64, Cell> = BTreeMap::new();
        for (first, after, mark) in marks {
            let blocks = self.clamp(first.div_euclid(b))..self.clamp((after - 1).div_euclid(b) + 1);
            for block in blocks {
                let covered = first <= block * b && (block + 1) * b <= after;
                let cell = if covered { mark } else { Cell::Mixed };
                let entry = cells.entry(block).or_insert(Cell::Empty);
                *entry = entry.union(cell);
            }
        }
        let mut zones: Vec<Zone> = Vec::new();
        let mut push = |end: i64, cells: Cells| match zones.last_mut() {
            Some(last) if last.cells == cells => last.end = end,
            _ => zones.push(Zone { end, cells }),
        };
        let mut next = 0;
        for (block, cell) in cells {
            if block > next {
                push(block, Cells::Same(Cell::Empty));
            }
            next = block + 1;
            push(
                next,
                match cell {
                    Cell::Mixed => Cells::Each,
                    decided => Cells::Same(decided),
                },
            );
        }
        if next < self.kv_blocks {
            push(self.kv_blocks, Cells::Same(Cell::Empty));
        }
        zones
    }

    /// Zones of a pattern in which some queries see all keys and the others none.
    fn whole_rows(&self, sees: impl Fn(i64) -> bool) -> Vec<Zone> {
        let rows = self.last - self.first + 1;
        let seeing = (self.first..=self.last).filter(|&p| sees(p)).count() as i64;
        self.all(Cells::Same(match seeing {
            0 => Cell::Empty,
            seeing if seeing == rows => Cell::Full,
            _ => Cell::Mixed,
        }))
    }

    fn zones<const N: usize>(&self, zones: [(i64, Cells); N]) -> Vec<Zone> {
        let mut start = 0;
        let mut kept = Vec::with_capacity(N);
        for (end, cells) in zones {
            if end > start {
                kept.push(Zone { end, cells });
                start = end;
            }
        }
        kept
    }
}

impl Pattern {
    /// The zones of a block row, covering `0..row.kv_blocks` in order.
    pub(crate) fn zones(&self, head: usize, row: &BlockRow) -> Vec<Zone> {
        let causal = |p: i64| p;
        match self {
            Self::Dense => row.all(Cells::Same(Cell::Full)),
            Self::Causal => row.interval(|_| 0, causal),
            Self::Local { window } => row.interval(|p| p - *window as i64 + 1, causal),
            Self::PrefixLm { prefix } => row.interval(|_| 0, |p| p.max(*prefix as i64 - 1)),
            Self::Streaming { window, sink } => merge(
                row.interval(|p| p - *window as i64 + 1, causal),
                row.interval(|_| 0, |p| p.min(*sink as i64 - 1)),
                Cell::union,
            ),
            Self::Strided { stride } => strided(row, *stride as i64),
            Self::Fixed {
                stride,
                columns,
                num_verts,
            } => {
                let kept = ColumnGroup::new(*stride, *columns, head, *num_verts);
                let stride = *stride as i64;
                merge(
                    row.interval(|p| p.div_euclid(stride) * stride, causal),
                    kept.causal_zones(row),
                    Cell::union,
                )
            }
            Self::Window { reach, dilation } => {
                let far = (*reach * *dilation) as i64;
                let dilation = *dilation as i64;
                let steps = match comes_round(row, dilation) {
                    true => row.all(Cells::Cycle(strided_cycle(row, dilation))),
                    false => diagonals(row, dilation, *reach as i64),
                };
                let near = row.interval(|p| p - far, |p| p + far);
                merge(near, steps, Cell::intersection)
            }
            Self::Chunked {
                size,
                before,
                after,
            } => {
                let [size, before, after] = [*size, *before, *after].map(|n| n as i64);
                row.interval(
                    |p| (p.div_euclid(size) - before) * size,
                    |p| (p.div_euclid(size) + after + 1) * size - 1,
                )
            }
            Self::Global { ranges } => merge(
                row.whole_rows(|p| is_in(ranges, p)),
                row.marked(ranges.iter().map(whole)),
                Cell::union,
            ),
            Self::GlobalKeys { ranges } => row.marked(ranges.iter().map(whole)),
            Self::Columns {
                stride,
                columns,
                num_verts,
            } => ColumnGroup::new(*stride, *columns, head, *num_verts).zones(row),
            Self::Rows {
                stride,
                rows,
                num_verts,
            } => row.whole_rows(|p| is_in_group(p, *stride, *rows, head, *num_verts)),
            Self::VerticalSlash { vertical, slash } => {
                let columns = vertical
                    .iter()
                    .map(|&v| (v as i64, v as i64 + 1))
                    .take_while(|&(first, _)| first <= row.last);
                let diagonals = slash
                    .iter()
                    .map(|&s| (row.first - s as i64, row.last - s as i64 + 1))
                    .take_while(|&(_, after)| after > 0);
                let marks = columns.chain(diagonals);
                row.marked(marks.map(|(first, after)| (first.max(0), after, Cell::Mixed)))
            }
            Self::Documents { starts } => {
                // Before the first document, and in the last, there is no end.
                const FAR: i64 = 1 << 60;
                row.interval(
                    |p| match document(starts, p) {
                        0 => -FAR,
                        after => starts[after - 1] as i64,
                    },
                    |p| {
                        starts
                            .get(document(starts, p))
                            .map_or(FAR, |&end| end as i64 - 1)
                    },
                )
            }
            Self::Packed { starts, pattern } => packed(row, starts, pattern, head),
            Self::RandomBlocks { block, .. } => {
                let size = *block as i64;
                let rows = row.first.div_euclid(size)..=row.last.div_euclid(size);
                let cell = match rows.clone().count() {
                    1 => Cell::Full,
                    _ => Cell::Mixed,
                };
                let drawn = rows.flat_map(|own| self.random_row(head, own));
                row.marked(drawn.map(|other| (other * size, (other + 1) * size, cell)))
            }
            Self::Union(parts) => merge_all(parts, head, row, Cell::union),
            Self::Intersection(parts) => merge_all(parts, head, row, Cell::intersection),
            Self::PerHead(parts) => parts[head % parts.len()].zones(head, row),
            Self::FromFn(_) => row.all(Cells::Each),
        }
    }
}

/// The zones of a pattern that is counted from where each document begins: those of the documents of this row, each moved to its place.
fn packed(row: &BlockRow, starts: &[usize], pattern: &Pattern, head: usize) -> Vec<Zone> {
    const FAR: i64 = 1 << 60;
    let documents = document(starts, row.first)..=document(starts, row.last);
    let alone = documents.clone().count() == 1;
    documents
        .map(|own| {
            let start = document_start(starts, own);
            let end = starts.get(own).map_or(FAR, |&end| end as i64);
            let first = match own {
                0 => row.first,
                _ => row.first.max(start),
            };
            let (b, shift) = (row.block_size, start.rem_euclid(row.block_size));
            let before = row.clamp(start / b);
            let inside = BlockRow {
                first: first - start,
                last: row.last.min(end - 1) - start,
                block_size: b,
                kv_blocks: row.kv_blocks - before,
            };
            let zones = match inside.kv_blocks {
                0 => Vec::new(),
                _ => pattern.zones(head, &inside),
            };
            let moved = moved(row, &zones, before, shift > 0, alone);
            let bounds = row.interval(|_| start, |_| end - 1);
            merge(moved, bounds, Cell::intersection)
        })
        .reduce(|a, b| merge(a, b, Cell::union))
        .expect("a row has queries")
}

/// Zones moved `before` blocks to the right; `between` blocks of them if the move is not one by whole blocks, so that block `J` has
/// the end of block `J − before − 1` and the beginning of the next. Only `alone` do all queries of the row see what a zone says.
fn moved(row: &BlockRow, zones: &[Zone], before: i64, between: bool, alone: bool) -> Vec<Zone> {
    let join = |a: Cell, b: Cell| match a == b && (alone || a == Cell::Empty) {
        true => a,
        false => Cell::Mixed,
    };
    let decided = |cells: &Cells| match cells {
        Cells::Same(cell) => Some(*cell),
        _ => None,
    };
    let mut result = row.zones([(before, Cells::Same(Cell::Empty))]);
    let mut start = 0;
    let mut previous = Some(Cell::Empty);
    for zone in zones {
        let first = decided(&zone.cells);
        if between {
            let cells = match previous.zip(first) {
                Some((a, b)) if join(a, b) != Cell::Mixed => Cells::Same(a),
                _ => Cells::Each,
            };
            result.push(Zone {
                end: before + start + 1,
                cells,
            });
            start += 1;
        }
        if zone.end > start {
            let cells = match &zone.cells {
                Cells::Same(cell) => Cells::Same(join(*cell, *cell)),
                Cells::Cycle(cycle) => {
                    let len = cycle.len() as i64;
                    let at = |block: i64| cycle[block.rem_euclid(len) as usize];
                    let cell = |k: i64| match between {
                        true => join(at(k - before - 1), at(k - before)),
                        false => join(at(k - before), at(k - before)),
                    };
                    Cells::Cycle((0..len).map(cell).collect())
                }
                Cells::Each => Cells::Each,
            };
            result.push(Zone {
                end: before + zone.end,
                cells,
            });
        }
        start = zone.end;
        previous = first;
    }
    result
}

/// A range of keys that all see.
fn whole(range: &(usize, usize)) -> (i64, i64, Cell) {
    (range.0 as i64, range.1 as i64, Cell::Full)
}

/// Whether blocks that repeat after `stride` positions do so within the keys. Where they do not, a cycle would list every block of the
/// row: then the pattern marks the few blocks that it has.
fn comes_round(row: &BlockRow, stride: i64) -> bool {
    stride == 1 || stride / gcd(stride, row.block_size) < row.kv_blocks
}

/// Zones of `j ≤ i ∧ (i − j) mod stride = 0`.
fn strided(row: &BlockRow, stride: i64) -> Vec<Zone> {
    match comes_round(row, stride) {
        true => row.periodic(strided_cycle(row, stride)),
        false => merge(
            diagonals(row, stride, i64::MAX),
            row.interval(|_| 0, |p| p),
            Cell::intersection,
        ),
    }
}

/// Zones of `(i − j) mod stride = 0` of which no more than `most` diagonals to each side of the main one are needed.
fn diagonals(row: &BlockRow, stride: i64, most: i64) -> Vec<Zone> {
    let end = row.kv_blocks * row.block_size;
    let first = (row.first - end).div_euclid(stride).max(-most);
    let last = row.last.div_euclid(stride).min(most);
    row.marked((first..=last).map(|k| {
        let distance = k * stride;
        (row.first - distance, row.last - distance + 1, Cell::Mixed)
    }))
}

/// Before the diagonal a block has the pair (i, j) iff i ≡ j modulo the stride.
fn strided_cycle(row: &BlockRow, stride: i64) -> Vec<Cell> {
    let b = row.block_size;
    if stride == 1 {
        return vec![Cell::Full];
    }
    let period = (stride / gcd(stride, b)).min(row.kv_blocks);
    let rows_after_first = row.last - row.first;
    (0..period)
        .map(|block| {
            // i − j runs over shift − (b − 1) ..= shift + rows_after_first: does it meet 0 mod stride?
            let shift = (row.first - block * b).rem_euclid(stride);
            match shift < b || shift + rows_after_first >= stride {
                true => Cell::Mixed,
                false => Cell::Empty,
            }
        })
        .collect()
}

/// The columns of each window that are a head's, whatever the query: [`is_in_group`] as an interval.
struct ColumnGroup {
    /// Width of a window.
    stride: i64,
    /// Where the columns begin in their window.
    start: i64,
    /// How many they are.
    width: i64,
}

impl ColumnGroup {
    fn new(stride: usize, width: usize, head: usize, num_verts: usize) -> Self {
        Self {
            stride: stride as i64,
            start: (stride - (head % num_verts + 1) * width) as i64,
            width: width as i64,
        }
    }

    fn zones(&self, row: &BlockRow) -> Vec<Zone> {
        match comes_round(row, self.stride) {
            true => row.all(Cells::Cycle(self.cycle(row))),
            false => row.marked(self.ranges(row)),
        }
    }

    /// The zones of the columns up to the query.
    fn causal_zones(&self, row: &BlockRow) -> Vec<Zone> {
        match comes_round(row, self.stride) {
            true => row.periodic(self.cycle(row)),
            false => merge(
                row.marked(self.ranges(row)),
                row.interval(|_| 0, |p| p),
                Cell::intersection,
            ),
        }
    }

    /// The blocks of one period.
    fn cycle(&self, row: &BlockRow) -> Vec<Cell> {
        let b = row.block_size;
        let period = (self.stride / gcd(self.stride, b)).min(row.kv_blocks);
        (0..period)
            .map(
                |block| match self.before((block + 1) * b) - self.before(block * b) {
                    0 => Cell::Empty,
                    kept if kept == b => Cell::Full,
                    _ => Cell::Mixed,
                },
            )
            .collect()
    }

    /// How many of the first `positions` are columns of the group.
    fn before(&self, positions: i64) -> i64 {
        let rest = positions % self.stride - self.start;
        positions / self.stride * self.width + rest.clamp(0, self.width)
    }

    /// The columns of each window.
    fn ranges(&self, row: &BlockRow) -> impl Iterator<Item = (i64, i64, Cell)> {
        let windows = row.kv_blocks * row.block_size / self.stride;
        (0..=windows).map(|window| {
            let first = window * self.stride + self.start;
            (first, first + self.width, Cell::Full)
        })
    }
}

impl Cells {
    /// Whether every block is known to be empty or full.
    fn are_decided(&self) -> bool {
        match self {
            Self::Same(cell) => *cell != Cell::Mixed,
            Self::Cycle(cells) => !cells.contains(&Cell::Mixed),
            Self::Each => false,
        }
    }
}

impl Cell {
    fn union(self, other: Self) -> Self {
        match (self, other) {
            (Self::Full, _) | (_, Self::Full) => Self::Full,
            (Self::Empty, x) | (x, Self::Empty) => x,
            _ => Self::Mixed,
        }
    }

    fn intersection(self, other: Self) -> Self {
        match (self, other) {
            (Self::Empty, _) | (_, Self::Empty) => Self::Empty,
            (Self::Full, x) | (x, Self::Full) => x,
            _ => Self::Mixed,
        }
    }
}

fn merge_all(
    parts: &[Pattern],
    head: usize,
    row: &BlockRow,
    op: fn(Cell, Cell) -> Cell,
) -> Vec<Zone> {
    parts
        .iter()
        .map(|part| part.zones(head, row))
        .reduce(|a, b| merge(a, b, op))
        .expect("a validated pattern has parts")
}

/// The zones of two patterns combined pair by pair.
fn merge(a: Vec<Zone>, b: Vec<Zone>, op: fn(Cell, Cell) -> Cell) -> Vec<Zone> {
    let mut merged: Vec<Zone> = Vec::with_capacity(a.len() + b.len());
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    let mut start = 0;
    while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
        let end = x.end.min(y.end);
        let cells = combine(&x.cells, &y.cells, start..end, op);
        match merged.last_mut() {
            // Mixed cells of two zones may have different masks.
            Some(last) if last.cells == cells && cells.are_decided() => last.end = end,
            _ => merged.push(Zone { end, cells }),
        }
        if x.end == end {
            a.next();
        }
        if y.end == end {
            b.next();
        }
        start = end;
    }
    merged
}

fn combine(a: &Cells, b: &Cells, blocks: Range<i64>, op: fn(Cell, Cell) -> Cell) -> Cells {
    match (a, b) {
        (Cells::Same(x), Cells::Same(y)) => Cells::Same(op(*x, *y)),
        (Cells::Each, Cells::Same(x)) | (Cells::Same(x), Cells::Each) => {
            // Each is Mixed everywhere; a part that decides alone leaves nothing to look at.
            match op(Cell::Mixed, *x) {
                Cell::Mixed => Cells::Each,
                decided => Cells::Same(decided),
            }
        }
        (Cells::Each, _) | (_, Cells::Each) => Cells::Each,
        _ if blocks.end - blocks.start == 1 => Cells::Each,
        _ => {
            let (x, y) = (cycle_of(a), cycle_of(b));
            // A period beyond the zone's end is never completed: the cells up to the end do.
            let period = lcm(x.len(), y.len()).map_or(blocks.end as usize, |period| {
                period.min(blocks.end as usize)
            });
            Cells::Cycle(
                (0..period)
                    .map(|k| op(x[k % x.len()], y[k % y.len()]))
                    .collect(),
            )
        }
    }
}

fn cycle_of(cells: &Cells) -> &[Cell] {
    match cells {
        Cells::Same(cell) => std::slice::from_ref(cell),
        Cells::Cycle(cycle) => cycle,
        Cells::Each => unreachable!("Each has no cycle"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of a pattern of its own in `docs/write-your-own-pattern.md`.
    fn dilated_zones(row: &BlockRow, window: usize, dilation: usize) -> Vec<Zone> {
        let causal = |p: i64| p;
        let (reach, dilation) = ((window * dilation) as i64, dilation as i64);
        merge(
            row.interval(|p| p - reach + 1, causal),
            row.periodic(strided_cycle(row, dilation)),
            Cell::intersection,
        )
    }

    fn dilated_attends(window: usize, dilation: usize, i: i64, j: i64) -> bool {
        let (window, dilation) = (window as i64, dilation as i64);
        j <= i && i - j < window * dilation && (i - j) % dilation == 0
    }

    /// Every pair of a block is as `cell` claims.
    fn holds(cell: Cell, row: &BlockRow, block: i64, attends: impl Fn(i64, i64) -> bool) -> bool {
        let keys = block * row.block_size..(block + 1) * row.block_size;
        let mut pairs = (row.first..=row.last).flat_map(|i| keys.clone().map(move |j| (i, j)));
        match cell {
            Cell::Empty => !pairs.any(|(i, j)| attends(i, j)),
            Cell::Full => pairs.all(|(i, j)| attends(i, j)),
            Cell::Mixed => true,
        }
    }

    #[test]
    fn the_dilated_window_of_the_tutorial_claims_nothing_false() {
        for (window, dilation) in [(1, 1), (3, 1), (2, 5), (4, 16), (3, 24), (8, 7)] {
            let attends = |i, j| dilated_attends(window, dilation, i, j);
            for (block_size, q_block) in [(8, 0), (8, 3), (8, 15), (16, 5), (16, 7)] {
                let row = BlockRow {
                    first: q_block * block_size,
                    last: (q_block + 1) * block_size - 1,
                    block_size,
                    kv_blocks: 128 / block_size,
                };
                let zones = dilated_zones(&row, window, dilation);
                assert_eq!(zones.last().map(|zone| zone.end), Some(row.kv_blocks));
                let mut start = 0;
                for Zone { end, cells } in zones {
                    for block in start..end {
                        let cell = match &cells {
                            Cells::Same(cell) => *cell,
                            Cells::Cycle(cycle) => cycle[block as usize % cycle.len()],
                            Cells::Each => Cell::Mixed,
                        };
                        assert!(
                            holds(cell, &row, block, attends),
                            "dilated({window}, {dilation}), blocks of {block_size}: {cell:?} at ({q_block}, {block})"
                        );
                    }
                    start = end;
                }
            }
        }
    }
}
