//! Zones of a block row and what is known about their blocks.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::arith::lcm;

/// Knowledge about a block before its pairs are evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cell {
    Empty,
    Full,
    /// Some pairs may be allowed: evaluate `attends`.
    Mixed,
}

/// The blocks of a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cells {
    /// All blocks have the same mask.
    Same(Cell),
    /// Block `J` has the same mask as every block of the zone that is congruent to `J` modulo the length.
    Cycle(Vec<Cell>),
    /// Nothing is known: evaluate each block.
    Each,
}

/// Blocks from the end of the previous zone up to `end` (exclusive).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub end: i64,
    pub cells: Cells,
}

/// One row of blocks: the positions of its queries and the number of key blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRow {
    /// Position of the first query.
    pub first: i64,
    /// Position of the last query (inclusive). The last row may be ragged.
    pub last: i64,
    pub block_size: i64,
    pub kv_blocks: i64,
}

impl BlockRow {
    /// Returns the first key block that is not entirely at or before the first query.
    pub(super) fn diagonal(&self) -> i64 {
        self.clamp((self.first + 1).div_euclid(self.block_size))
    }

    /// Returns one past the last key block that starts at or before the last query.
    pub(super) fn causal_end(&self) -> i64 {
        self.clamp(self.last.div_euclid(self.block_size) + 1)
    }

    pub(super) fn clamp(&self, block: i64) -> i64 {
        block.clamp(0, self.kv_blocks)
    }

    pub(super) fn all(&self, cells: Cells) -> Vec<Zone> {
        vec![Zone {
            end: self.kv_blocks,
            cells,
        }]
    }

    /// Returns the zones of a pattern whose query `p` sees the keys `low(p)..=high(p)`, both non-decreasing in `p`.
    pub(super) fn interval(
        &self,
        low: impl Fn(i64) -> i64,
        high: impl Fn(i64) -> i64,
    ) -> Vec<Zone> {
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

    /// Returns the zones of a causal pattern that is periodic in the keys, with period `cycle` before the diagonal.
    pub(super) fn periodic(&self, cycle: Vec<Cell>) -> Vec<Zone> {
        let diagonal = self.diagonal();
        self.zones([
            (diagonal, Cells::Cycle(cycle)),
            (self.causal_end().max(diagonal), Cells::Each),
            (self.kv_blocks, Cells::Same(Cell::Empty)),
        ])
    }

    /// Returns the zones of a pattern that is empty outside the key positions `first..after` of its marks. All pairs of a mark are allowed
    /// (`Full`), or some may be (`Mixed`).
    pub(super) fn marked(&self, marks: impl IntoIterator<Item = (i64, i64, Cell)>) -> Vec<Zone> {
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

    /// Returns the zones of a pattern in which some queries see all keys and the others none.
    pub(super) fn whole_rows(&self, sees: impl Fn(i64) -> bool) -> Vec<Zone> {
        let rows = self.last - self.first + 1;
        let seeing = (self.first..=self.last).filter(|&p| sees(p)).count() as i64;
        self.all(Cells::Same(match seeing {
            0 => Cell::Empty,
            seeing if seeing == rows => Cell::Full,
            _ => Cell::Mixed,
        }))
    }

    pub(super) fn zones<const N: usize>(&self, zones: [(i64, Cells); N]) -> Vec<Zone> {
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

impl Cells {
    /// Returns whether every block is known to be empty or full.
    pub(super) fn are_decided(&self) -> bool {
        match self {
            Self::Same(cell) => *cell != Cell::Mixed,
            Self::Cycle(cells) => !cells.contains(&Cell::Mixed),
            Self::Each => false,
        }
    }
}

impl Cell {
    pub(super) fn union(self, other: Self) -> Self {
        match (self, other) {
            (Self::Full, _) | (_, Self::Full) => Self::Full,
            (Self::Empty, x) | (x, Self::Empty) => x,
            _ => Self::Mixed,
        }
    }

    pub(super) fn intersection(self, other: Self) -> Self {
        match (self, other) {
            (Self::Empty, _) | (_, Self::Empty) => Self::Empty,
            (Self::Full, x) | (x, Self::Full) => x,
            _ => Self::Mixed,
        }
    }
}

/// Combines the zones of two patterns pair by pair.
pub(super) fn merge(a: Vec<Zone>, b: Vec<Zone>, op: fn(Cell, Cell) -> Cell) -> Vec<Zone> {
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
            // `Each` is mixed everywhere. If the other part alone decides the result, no block has to be evaluated.
            match op(Cell::Mixed, *x) {
                Cell::Mixed => Cells::Each,
                decided => Cells::Same(decided),
            }
        }
        (Cells::Each, _) | (_, Cells::Each) => Cells::Each,
        _ if blocks.end - blocks.start == 1 => Cells::Each,
        _ => {
            let (x, y) = (cycle_of(a), cycle_of(b));
            // A period beyond the zone's end is never completed, so the cells up to the end suffice.
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
