//! The zones of strides: of what repeats after a number of positions.

use super::Pattern;
use super::cells::{BlockRow, Cell, Cells, Zone, merge};
use crate::arith::gcd;

/// Returns whether blocks that repeat after `stride` positions do so within the keys. Where they do not, a cycle would list every block of the
/// row: then the pattern marks the few blocks that it has.
pub(super) fn comes_round(row: &BlockRow, stride: i64) -> bool {
    stride == 1 || stride / gcd(stride, row.block_size) < row.kv_blocks
}

/// Zones of `j ≤ i ∧ (i − j) mod stride = 0`.
pub(super) fn strided(row: &BlockRow, stride: i64) -> Vec<Zone> {
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
pub(super) fn diagonals(row: &BlockRow, stride: i64, most: i64) -> Vec<Zone> {
    let end = row.kv_blocks * row.block_size;
    let first = (row.first - end).div_euclid(stride).max(-most);
    let last = row.last.div_euclid(stride).min(most);
    row.marked((first..=last).map(|k| {
        let distance = k * stride;
        (row.first - distance, row.last - distance + 1, Cell::Mixed)
    }))
}

/// Before the diagonal a block has the pair (i, j) iff i ≡ j modulo the stride.
pub(super) fn strided_cycle(row: &BlockRow, stride: i64) -> Vec<Cell> {
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

/// The columns of each window that are a head's, whatever the query; of [`Pattern::Rows`] the rows.
pub(super) struct Group {
    /// Width of a window.
    stride: i64,
    /// Where the columns begin in their window.
    pub start: i64,
    /// How many they are.
    width: i64,
}

impl Pattern {
    /// The group of a head, of a pattern whose heads have groups in turn, counted from the end of a window.
    pub(super) fn group(&self, head: usize) -> Option<Group> {
        let (stride, width, num_verts) = match self {
            Self::Fixed {
                stride,
                columns,
                num_verts,
            }
            | Self::Columns {
                stride,
                columns,
                num_verts,
            } => (stride, columns, num_verts),
            Self::Rows {
                stride,
                rows,
                num_verts,
            } => (stride, rows, num_verts),
            _ => return None,
        };
        let number = head.checked_rem(*num_verts)?;
        let from_end = number.checked_add(1)?.checked_mul(*width)?;
        Some(Group {
            stride: *stride as i64,
            start: stride.checked_sub(from_end)? as i64,
            width: *width as i64,
        })
    }

    /// Returns whether a position is of the head's [group](Self::group).
    pub(super) fn has_in_group(&self, head: usize, position: i64) -> bool {
        self.group(head).is_some_and(|group| {
            let columns = group.start..group.start.wrapping_add(group.width);
            let at = position.checked_rem_euclid(group.stride);
            at.is_some_and(|at| columns.contains(&at))
        })
    }
}

impl Group {
    pub(super) fn zones(&self, row: &BlockRow) -> Vec<Zone> {
        match comes_round(row, self.stride) {
            true => row.all(Cells::Cycle(self.cycle(row))),
            false => row.marked(self.ranges(row)),
        }
    }

    /// The zones of the columns up to the query.
    pub(super) fn causal_zones(&self, row: &BlockRow) -> Vec<Zone> {
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
