//! Zones of strided patterns, which repeat with a period.

use super::Pattern;
use super::cells::{BlockRow, Cell, Cells, Zone, merge};
use crate::arith::gcd;

/// Returns whether blocks with period `stride` repeat within the keys. If they do not, a cycle would list every block of the row, so the pattern marks its few
/// blocks instead.
pub(super) fn comes_round(row: &BlockRow, stride: i64) -> bool {
    stride == 1 || stride / gcd(stride, row.block_size) < row.kv_blocks
}

/// Returns the zones of `j ≤ i ∧ (i − j) mod stride = 0`.
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

/// Returns the zones of `(i − j) mod stride = 0`, limited to `most` diagonals on each side of the main one.
pub(super) fn diagonals(row: &BlockRow, stride: i64, most: i64) -> Vec<Zone> {
    let end = row.kv_blocks * row.block_size;
    let first = (row.first - end).div_euclid(stride).max(-most);
    let last = row.last.div_euclid(stride).min(most);
    row.marked((first..=last).map(|k| {
        let distance = k * stride;
        (row.first - distance, row.last - distance + 1, Cell::Mixed)
    }))
}

/// Returns the cycle of blocks before the diagonal, where a block has the pair (i, j) iff i ≡ j modulo the stride.
pub(super) fn strided_cycle(row: &BlockRow, stride: i64) -> Vec<Cell> {
    let b = row.block_size;
    if stride == 1 {
        return vec![Cell::Full];
    }
    let period = (stride / gcd(stride, b)).min(row.kv_blocks);
    let rows_after_first = row.last - row.first;
    (0..period)
        .map(|block| {
            // i − j ranges over shift − (b − 1) ..= shift + rows_after_first. The block is not empty if that contains a multiple of the stride.
            let shift = (row.first - block * b).rem_euclid(stride);
            match shift < b || shift + rows_after_first >= stride {
                true => Cell::Mixed,
                false => Cell::Empty,
            }
        })
        .collect()
}

/// A head's columns in each window, the same for all queries. For [`Pattern::Rows`], its rows.
pub(super) struct Group {
    /// Width of a window.
    stride: i64,
    /// Start of the columns within a window.
    pub start: i64,
    /// Number of columns.
    width: i64,
}

impl Pattern {
    /// Returns the group of a head, if the heads of the pattern use groups in turn. Groups are counted from the end of a window.
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

    /// Returns whether a position is in the head's [group](Self::group).
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

    /// Returns the zones of the columns at or before the query.
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

    /// Returns the blocks of one period.
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

    /// Returns how many of the first `positions` positions are columns of the group.
    fn before(&self, positions: i64) -> i64 {
        let rest = positions % self.stride - self.start;
        positions / self.stride * self.width + rest.clamp(0, self.width)
    }

    /// Returns the columns of each window.
    fn ranges(&self, row: &BlockRow) -> impl Iterator<Item = (i64, i64, Cell)> {
        let windows = row.kv_blocks * row.block_size / self.stride;
        (0..=windows).map(|window| {
            let first = window * self.stride + self.start;
            (first, first + self.width, Cell::Full)
        })
    }
}
