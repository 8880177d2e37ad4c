//! Maxima epilogue: writes only the maximum of each run of columns.
//!
//! A unit holds two of every eight columns of a row and its three neighbours the others, so a run's maximum takes two exchanges. Each unit writes one of four
//! runs.

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use crate::kernels::linear::epilogue::{Lane, Place, ResultShape};
use crate::kernels::linear::log_sums::store_runs;
use crate::kernels::linear::tile::ProductTile;
use blocksparse_cubecl::arch::ptx::shuffle_xor;

/// Writes the maxima of runs, `[batch, rows, columns / run]`. NaN is ignored if a run has other scores.
#[cube]
pub fn store_maxima<S: Size, W: Size>(
    out: &mut [Vector<u32, W>],
    sums: &Vector<f32, S>,
    place: &Place,
    shape: &ResultShape,
    own: &Lane,
    #[comptime] t: ProductTile,
) {
    let run = comptime!(t.written());
    let (runs, eights) = comptime!((t.cols / run, run / 8));
    let quarter = own.lane % 4;
    let first_run = place.col / comptime!(run as u32);
    #[unroll]
    for lower in 0..2usize {
        let row = place.row + own.row() + comptime!(8 * lower as u32);
        let row_runs = shape.cols / comptime!(run as u32);
        let start = (place.matrix * shape.rows + row) as usize * row_runs as usize;
        let row_runs = select(row < shape.rows, row_runs, 0u32);
        let mut written = 0.0f32.runtime();
        #[unroll]
        for r in 0..runs {
            // Separate maxima of even and odd columns shorten the dependency chains.
            let mut even = sums.extract(comptime!(4 * r * eights + 2 * lower));
            let mut odd = sums.extract(comptime!(4 * r * eights + 2 * lower + 1));
            #[unroll]
            for i in 1..eights {
                let at = comptime!(4 * (r * eights + i) + 2 * lower);
                even = max(even, sums.extract(at));
                odd = max(odd, sums.extract(comptime!(at + 1)));
            }
            let mut top = max(even, odd);
            top = max(top, shuffle_xor(top, 1u32));
            top = max(top, shuffle_xor(top, 2u32));
            written = select(quarter == comptime!(r as u32 % 4), top, written);
            if comptime!(r % 4 == 3 || r + 1 == runs) {
                store_runs::<W>(out, written, start, first_run, row_runs, quarter, r);
            }
        }
    }
}
