//! Log-sum epilogue: logarithms of sums of exponentials of scores over runs of columns, restricted to the columns that each row sees.
//!
//! A unit holds two of every eight columns of a row and its three neighbours the others, so a run's maximum and its sum take two exchanges each. Each unit
//! writes one of four runs.

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use crate::kernels::linear::epilogue::{Lane, Place, ResultShape};
use crate::kernels::linear::places::{Tiles, place_of};
use crate::kernels::linear::tile::{ProductTile, ROWS};
use blocksparse_cubecl::arch::ptx::{exp2, log2, shuffle_xor};

/// Columns that each row sees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeenColumns {
    /// Row `i` sees the columns before `first + i`.
    pub first: i64,
    /// Upper bound of the columns that a row sees.
    pub columns: usize,
    /// Factor of the products.
    pub factor: f64,
}

impl SeenColumns {
    /// Returns the number of column tiles of `cols` columns that a row of tile `row_tile` sees, of a matrix with `rows` rows.
    fn tiles_of(&self, rows: usize, row_tile: usize, cols: usize) -> usize {
        let last = ((row_tile + 1) * ROWS).min(rows) as i64 - 1;
        let seen = (self.first + last).clamp(0, self.columns as i64);
        (seen as usize).div_ceil(cols)
    }

    /// Returns the number of tiles of a matrix with `rows` rows.
    pub(crate) fn tiles(&self, rows: usize, cols: usize) -> usize {
        (0..rows.div_ceil(ROWS))
            .map(|row_tile| self.tiles_of(rows, row_tile, cols))
            .sum()
    }

    pub(crate) fn launched(&self, tiles: usize) -> SeenLaunch {
        SeenLaunch::new(
            self.first.clamp(-(1 << 30), 1 << 30) as i32,
            self.columns as u32,
            tiles as u32,
            (self.factor * std::f64::consts::LOG2_E) as f32,
        )
    }
}

/// Kernel argument of [`SeenColumns`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Seen {
    pub first: i32,
    pub columns: u32,
    /// Tiles of a matrix.
    pub tiles: u32,
    /// Factor of the products, for base-2 exponentials.
    pub factor: f32,
}

/// Returns the number of column tiles that a row of `row_tile` sees.
#[cube]
fn tiles_of(seen: &Seen, shape: &ResultShape, row_tile: u32, #[comptime] cols: usize) -> u32 {
    let last = min((row_tile + 1) * comptime!(ROWS as u32), shape.rows) as i32 - 1;
    let end = min(max(seen.first + last, 0i32), seen.columns as i32) as u32;
    end.div_ceil(comptime!(cols as u32))
}

/// Returns the position of a tile among the visible tiles, if others are skipped. With maxima, row tiles of all matrices vary fastest: they are few and meet
/// the same columns, which are then read from memory once.
#[cube]
pub fn seen_place(
    tiles: &Tiles,
    seen: &Seen,
    shape: &ResultShape,
    tile: u32,
    #[comptime] t: ProductTile,
) -> Place {
    let mut full = tile;
    if comptime!(t.is_seen()) {
        let mut left = tile % seen.tiles;
        let mut row_tile = 0u32.runtime();
        let mut own = tiles_of(seen, shape, row_tile, t.cols);
        while left >= own {
            left -= own;
            row_tile += 1;
            own = tiles_of(seen, shape, row_tile, t.cols);
        }
        full = (tile / seen.tiles * tiles.rows + row_tile) * tiles.cols + left;
    }
    if comptime!(t.is_maxima()) {
        let rows = tiles.count / tiles.cols;
        full = tile % rows * tiles.cols + tile / rows;
    }
    place_of(tiles, full, t.cols)
}

/// Below every score.
const LOWEST: f32 = -3.0e38;

/// Writes the natural logarithms of the sums of exponentials over runs, `[batch, rows, columns / run]`. A run that a row does not see gets a value below
/// every score.
#[cube]
pub fn store_log_sums<S: Size, W: Size>(
    out: &mut [Vector<u32, W>],
    sums: &Vector<f32, S>,
    place: &Place,
    shape: &ResultShape,
    seen: &Seen,
    own: &Lane,
    #[comptime] t: ProductTile,
) {
    let run = comptime!(t.written());
    let (runs, eights) = comptime!((t.cols / run, run / 8));
    let quarter = own.lane % 4;
    #[unroll]
    for lower in 0..2usize {
        let row = place.row + own.row() + comptime!(8 * lower as u32);
        let end = min(seen.first + row as i32, seen.columns as i32);
        // Relative to the unit's first column of the tile.
        let end = end - (place.col + quarter * 2) as i32;
        let row_runs = shape.cols / comptime!(run as u32);
        let first_run = place.col / comptime!(run as u32);
        let start = (place.matrix * shape.rows + row) as usize * row_runs as usize;
        let mut written = 0.0f32.runtime();
        #[unroll]
        for r in 0..runs {
            let mut scores = Array::<f32>::new(comptime!(2 * eights));
            let mut top = comptime!(LOWEST).runtime();
            #[unroll]
            for i in 0..comptime!(2 * eights) {
                let (eight, odd) = comptime!((r * eights + i / 2, i % 2));
                let score = sums.extract(comptime!(4 * eight + 2 * lower + odd)) * seen.factor;
                let is_seen = comptime!((8 * eight + odd) as i32).runtime() < end;
                let score = select(is_seen, score, comptime!(LOWEST).runtime());
                scores[i] = score;
                top = max(top, score);
            }
            top = max(top, shuffle_xor(top, 1u32));
            top = max(top, shuffle_xor(top, 2u32));
            let mut sum = 0.0f32.runtime();
            #[unroll]
            for i in 0..comptime!(2 * eights) {
                sum += exp2(scores[i] - top);
            }
            sum += shuffle_xor(sum, 1u32);
            sum += shuffle_xor(sum, 2u32);
            let log = (top + log2(sum)) * comptime!(std::f32::consts::LN_2);
            written = select(quarter == comptime!(r as u32 % 4), log, written);
            if comptime!(r % 4 == 3 || r + 1 == runs) {
                let row_runs = select(row < shape.rows, row_runs, 0u32);
                store_runs::<W>(out, written, start, first_run, row_runs, quarter, r);
            }
        }
    }
}

/// Writes one value of each of up to four runs of a row, one per unit; `last` is the unit's own run. Runs past the row's end are not written.
#[cube]
pub(crate) fn store_runs<W: Size>(
    out: &mut [Vector<u32, W>],
    number: f32,
    row: usize,
    first: u32,
    row_runs: u32,
    quarter: u32,
    #[comptime] last: usize,
) {
    let run = first + comptime!(last as u32 / 4 * 4) + quarter;
    if quarter <= comptime!(last as u32 % 4) && run < row_runs {
        let mut word = Vector::<u32, W>::zeroed();
        word.insert(0usize, u32::reinterpret(number));
        out[row + run as usize] = word;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the tiles with a row and a column that it sees, and no others.
    #[test]
    fn seen_tiles_are_counted() {
        for (rows, first, columns) in [
            (1024, 1, 1024),
            (1000, 3001, 4000),
            (130, -100, 900),
            (64, i64::MAX / 2, 257),
            (5, -5, 40),
        ] {
            let seen = SeenColumns {
                first,
                columns,
                factor: 1.0,
            };
            for cols in [64, 256] {
                let is_seen = |row: usize, column: usize| {
                    (column as i64) < first + row as i64 && column < columns
                };
                let tiles = (0..rows)
                    .step_by(ROWS)
                    .flat_map(|row| (0..columns).step_by(cols).map(move |column| (row, column)));
                let wanted = tiles.filter(|&(row, column)| {
                    (row..(row + ROWS).min(rows)).any(|row| is_seen(row, column))
                });
                assert_eq!(seen.tiles(rows, cols), wanted.count(), "{seen:?} {rows}");
            }
        }
    }
}
