//! Divides a block row of a pattern into zones whose blocks have predictable masks.
//!
//! A layout must be built in time proportional to its kept blocks, so not every pair can be evaluated. Instead each pattern describes a block row as *zones*:
//! consecutive key blocks in which the mask of a block depends only on `block mod period`. One block of each residue class then represents all of them, and its
//! mask comes from [`Pattern::attends`], the definition. A pattern that claims too little (`Each`) costs time. Two errors are possible: a zone that claims too
//! much, and a wrong `shift_period`, since masks are cached by distance and phase. The tests compare random layouts with `attends` pair by pair and find both.
//!
//! ```text
//! fixed(128, 32), block size 32, block row 14 (positions 448..480):
//! key block   0  1  2  3  4  5  6  7  8  9 10 11 | 12 13 | 14 | 15 ..
//! zone        Cycle [Empty, Empty, Empty, Full]  | Full  | Each | Empty
//! ```

use super::Pattern;
use super::attends::{document, document_start, is_in};
use super::cells::{BlockRow, Cell, Cells, Zone, merge};
use super::repeats::{comes_round, diagonals, strided, strided_cycle};

impl Pattern {
    /// Returns the zones of a block row, in order, which cover `0..row.kv_blocks`.
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
            Self::Fixed { stride, .. } => {
                let stride = *stride as i64;
                merge(
                    row.interval(|p| p.div_euclid(stride) * stride, causal),
                    self.group(head).expect(VALID).causal_zones(row),
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
            Self::Columns { .. } => self.group(head).expect(VALID).zones(row),
            Self::Rows { .. } => row.whole_rows(|p| self.has_in_group(head, p)),
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
            Self::Documents { starts } => documents(row, starts),
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

const VALID: &str = "a validated pattern has groups";

/// Returns the zones of documents that begin at `starts`: each position sees its own document.
fn documents(row: &BlockRow, starts: &[usize]) -> Vec<Zone> {
    // No bound before the first document and after the start of the last one.
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

/// Returns the zones of a pattern that is counted from the start of each document: the zones of each document of this row, shifted to its place.
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

/// Returns zones shifted right by `before` blocks. With `between`, the shift is `before` blocks and a fraction: block `J` then has
/// the end of block `J − before − 1` and the beginning of the next. Unless `alone`, only some queries of the row are in the document, so a full zone may be
/// mixed.
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

/// Marks a range of keys that every query sees.
fn whole(range: &(usize, usize)) -> (i64, i64, Cell) {
    (range.0 as i64, range.1 as i64, Cell::Full)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of a custom pattern in `docs/dev/add-a-pattern.md`.
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

    /// Checks that every pair of a block is as `cell` claims.
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
