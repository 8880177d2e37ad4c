//! Line-sum epilogue: computes softmax weights from scores and sums them over the rows of a warpgroup, for each column and along each diagonal. The weights
//! are not written.
//!
//! The logarithm of each row's sum of exponentials is an input. A unit holds rows `r` and `r + 8` of a warp's sixteen, and two of every eight columns. So it
//! adds two weights of a column, and two of a diagonal (the lower row's are eight columns further right), before it exchanges with others.
//!
//! ```text
//! columns     units of a column trade halves of theirs three times, each ends with an eighth
//! diagonals   a warp writes eight rows, and each unit adds up what lies one place further to the left in each
//! warpgroup   the four warps' sums go through shared memory, in order
//! ```

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use crate::kernels::linear::epilogue::{Lane, Place, ResultShape};
use crate::kernels::linear::log_sums::Seen;
use crate::kernels::linear::tile::{ProductTile, line_row, line_words};
use blocksparse_cubecl::arch::ptx::{
    exp2, multiply_add, shared_load, shared_store, shared_store_two, shuffle_xor,
};
use blocksparse_cubecl::arch::tma::named_sync;

/// Warpgroups of a tile.
pub const LINE_GROUPS: usize = 2;
/// Rows of a warpgroup.
pub const LINE_ROWS: usize = 64;

/// A matrix is skipped if its first row's logarithm is at least this.
pub const UNWANTED: f32 = 1e30;

/// Rows of a warp.
const WARP_ROWS: usize = 16;

/// Returns the number of diagonals of `rows` rows of a tile.
fn diagonals(cols: usize, rows: usize) -> usize {
    cols + rows - 1
}

/// Returns the number of diagonals of a warp that each unit sums.
fn unit_diagonals(cols: usize) -> usize {
    diagonals(cols, WARP_ROWS).div_ceil(32)
}

/// Returns the number of elements that a warpgroup writes for a tile of `cols` columns: the columns' sums, then those of the diagonals. Diagonal `u` contains
/// column `c` of row `c + 63 − u`.
pub fn line_elements(cols: usize) -> usize {
    cols + diagonals(cols, LINE_ROWS).next_multiple_of(8)
}

/// Returns whether a matrix's sums are wanted.
#[cube]
pub fn is_wanted<W: Size>(
    logs: &ComptimeOption<Box<[Vector<f32, W>]>>,
    place: &Place,
    shape: &ResultShape,
) -> bool {
    let first = logs.as_ref().unwrap()[(place.batch * shape.rows) as usize];
    first.extract(0usize) < comptime!(UNWANTED)
}

/// Writes the sums of a warpgroup's weights `2^(factor · score − log)` over the columns that each row sees: `[batch, tiles of a matrix, 2, line_elements]`.
/// `logs` is `[batch, rows]`, to base 2.
#[cube]
pub fn store_line_sums<S: Size, W: Size>(
    out: &mut [Vector<u32, W>],
    logs: &ComptimeOption<Box<[Vector<f32, W>]>>,
    sums: &Vector<f32, S>,
    place: &Place,
    shape: &ResultShape,
    seen: &Seen,
    own: &Lane,
    base: u32,
    #[comptime] t: ProductTile,
) {
    let group = own.warp / 4;
    // A warpgroup without rows writes no sums.
    if group * comptime!(LINE_ROWS as u32) < shape.rows {
        let weights = weights_of::<S, W>(logs, sums, place, shape, seen, own, t);
        let words = comptime!(line_words(t.cols) as u32);
        let of_warp = base + comptime!(t.totals()) + own.warp * comptime!(words * 4);
        sum_lines(&weights, of_warp, own.lane, t);

        named_sync(1 + group, 128u32);
        let cols = comptime!(t.cols);
        let first = base + comptime!(t.totals()) + group * comptime!(words * 16);
        let tile = place.col / comptime!(cols as u32);
        let numbers = comptime!(line_elements(cols));
        let target = (place.batch * seen.tiles + tile) * comptime!(LINE_GROUPS as u32) + group;
        let target = target as usize * numbers;
        let unit = own.unit % 128;
        #[unroll]
        for part in 0..comptime!(cols.div_ceil(128)) {
            let col = unit + comptime!(128 * part as u32);
            if col < comptime!(cols as u32) {
                let at = first + (comptime!(32 * unit_diagonals(cols) as u32) + col) * 4;
                let mut sum = 0.0f32.runtime();
                #[unroll]
                for warp in 0..4u32 {
                    sum += f32::reinterpret(shared_load(at + comptime!(warp * words * 4)));
                }
                out[target + col as usize] = word::<W>(sum);
            }
        }
        #[unroll]
        for part in 0..comptime!(diagonals(cols, LINE_ROWS).div_ceil(128)) {
            let diagonal = unit + comptime!(128 * part as u32);
            if diagonal < comptime!(diagonals(cols, LINE_ROWS) as u32) {
                let mut sum = 0.0f32.runtime();
                #[unroll]
                for warp in 0..4u32 {
                    // The warpgroup's first diagonal belongs to its last row, and a warp's first diagonal to the warp's last row.
                    let lower = comptime!((3 - warp) * WARP_ROWS as u32);
                    let end = comptime!(diagonals(cols, WARP_ROWS) as u32 + lower);
                    let is_own = diagonal >= lower && diagonal < end;
                    let at = select(is_own, diagonal, lower.runtime()) - lower;
                    let number = shared_load(first + comptime!(warp * words * 4) + at * 4);
                    sum += select(is_own, f32::reinterpret(number), 0.0f32);
                }
                out[target + cols + diagonal as usize] = word::<W>(sum);
            }
        }
        // Wait before the next tile's weights overwrite them.
        named_sync(1 + group, 128u32);
    }
}

#[cube]
fn word<W: Size>(number: f32) -> Vector<u32, W> {
    let mut word = Vector::<u32, W>::zeroed();
    word.insert(0usize, u32::reinterpret(number));
    word
}

/// Converts a unit's scores to weights.
#[cube]
fn weights_of<S: Size, W: Size>(
    logs: &ComptimeOption<Box<[Vector<f32, W>]>>,
    sums: &Vector<f32, S>,
    place: &Place,
    shape: &ResultShape,
    seen: &Seen,
    own: &Lane,
    #[comptime] t: ProductTile,
) -> Array<f32> {
    let quarter = own.lane % 4;
    let mut weights = Array::<f32>::new(comptime!(t.cols / 2));
    #[unroll]
    for lower in 0..2usize {
        let row = own.row() + comptime!(8 * lower as u32);
        let at = place.batch * shape.rows + min(row, shape.rows - 1);
        let log = logs.as_ref().unwrap()[at as usize].extract(0usize);
        let end = min(seen.first + row as i32, seen.columns as i32);
        let end = select(row < shape.rows, end, 0i32);
        // Relative to the unit's first column of the tile.
        let end = end - (place.col + quarter * 2) as i32;
        // Rows see whole tiles except the last ones: skip the comparison for each weight there.
        if end > comptime!(t.cols as i32) {
            #[unroll]
            for i in 0..comptime!(t.cols / 4) {
                let at = comptime!(i / 2 * 4 + 2 * lower + i % 2);
                weights[at] = exp2(multiply_add(sums.extract(at), seen.factor, -log));
            }
        } else {
            #[unroll]
            for i in 0..comptime!(t.cols / 4) {
                let (eight, odd) = comptime!((i / 2, i % 2));
                let at = comptime!(4 * eight + 2 * lower + odd);
                let weight = exp2(multiply_add(sums.extract(at), seen.factor, -log));
                let is_seen = comptime!((8 * eight + odd) as i32).runtime() < end;
                weights[at] = select(is_seen, weight, 0.0f32);
            }
        }
    }
    weights
}

/// Sums over a warp's rows into its own shared memory: its diagonals, then its columns.
#[cube]
fn sum_lines(weights: &Array<f32>, of_warp: u32, lane: u32, #[comptime] t: ProductTile) {
    let (cols, eights) = comptime!((t.cols, t.cols / 8));
    let row_words = comptime!(line_row(cols));
    let quarter = lane % 4;
    // Adds rows `r` and rows `r + 8` shifted by eight columns.
    let row = of_warp + (lane / 4 * comptime!(row_words as u32) + quarter * 2) * 4;
    #[unroll]
    for eight in 0..comptime!(eights + 1) {
        let mut two = Array::<f32>::new(2usize);
        #[unroll]
        for odd in 0..2usize {
            let mut sum = 0.0f32.runtime();
            if comptime!(eight > 0) {
                sum += weights[comptime!(4 * eight.saturating_sub(1) + odd)];
            }
            if comptime!(eight < eights) {
                sum += weights[comptime!(4 * eight.min(eights - 1) + 2 + odd)];
            }
            two[odd] = sum;
        }
        shared_store_two(row + comptime!(32 * eight as u32), two[0], two[1]);
    }
    sync_plane();
    let each = comptime!(unit_diagonals(cols));
    let mut along = Array::<f32>::new(each);
    #[unroll]
    for part in 0..each {
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for r in 0..8usize {
            // The diagonal is one column further right in row `r` than in the row before.
            let place = lane as i32 + comptime!(32 * part as i32 + r as i32 - 7);
            let is_inside = comptime!(part > 0 && 32 * part + 31 + r < row_words + 7);
            if comptime!(is_inside) {
                let at = place as u32 + comptime!((r * row_words) as u32);
                sum += f32::reinterpret(shared_load(of_warp + at * 4));
            } else {
                let is_there = place >= 0i32 && place < comptime!(row_words as i32);
                let at = select(is_there, place, 0i32) as u32 + comptime!((r * row_words) as u32);
                let number = f32::reinterpret(shared_load(of_warp + at * 4));
                sum += select(is_there, number, 0.0f32);
            }
        }
        along[part] = sum;
    }

    let mut columns = Array::<f32>::new(comptime!(cols / 4));
    #[unroll]
    for i in 0..comptime!(cols / 4) {
        let at = comptime!(i / 2 * 4 + i % 2);
        columns[i] = weights[at] + weights[comptime!(at + 2)];
    }
    #[unroll]
    for step in 0..3usize {
        let half = comptime!((cols / 8) >> step);
        let mask = comptime!(16u32 >> step);
        let is_high = lane & mask != 0;
        #[unroll]
        for i in 0..half {
            let (low, high) = (columns[i], columns[comptime!(i + half)]);
            let other = shuffle_xor(select(is_high, low, high), mask);
            columns[i] = select(is_high, high, low) + other;
        }
    }
    // Wait until all lanes have read the shared memory.
    sync_plane();
    #[unroll]
    for part in 0..each {
        let at = lane + comptime!(32 * part as u32);
        shared_store(of_warp + at * 4, u32::reinterpret(along[part]));
    }
    let row = lane / 4;
    // The bits of the row, highest first, select the eighth of the columns.
    let first = of_warp + (comptime!(32 * each as u32) + row * comptime!(cols as u32 / 8)) * 4;
    #[unroll]
    for i in 0..comptime!(cols / 64) {
        let at = first + (comptime!(8 * i as u32) + quarter * 2) * 4;
        shared_store_two(at, columns[comptime!(2 * i)], columns[comptime!(2 * i + 1)]);
    }
}
