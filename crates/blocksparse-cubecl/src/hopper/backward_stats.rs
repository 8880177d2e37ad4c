//! Kernels before and after the fused backward kernel: stats of each query, and dQ from its sums.

// Compile-time conditions stay separate from run-time ones.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use super::tiles::BackwardTile;
use crate::arch::sm90::*;
use crate::shared::addressing::{Listing, Strides, position_of};
use crate::shared::score::LOW;

/// Computes `stats[head, place] = (lse · log2 e, delta)` with `delta = rowsum(dO ∘ O) − dlse`, for the query at each place, and zeros the counters. Rows
/// without keys get lse and delta 0, so that no infinity enters the arithmetic. Places without a position get zeros. A unit has eight columns of a row, and
/// a row has `lanes` units.
#[cube(launch_unchecked)]
pub fn stats(
    out: &[Vector<u32, Const<4>>],
    grad_out: &[Vector<u32, Const<4>>],
    lse: &[f32],
    grad_lse: ComptimeOption<Box<[f32]>>,
    stats: &mut [f32],
    counters: &mut [u32],
    grad_strides: Strides,
    listing: Listing,
    heads: u32,
    rows: u32,
    pitch: u32,
    #[comptime] lanes: u32,
    #[comptime] t: BackwardTile,
) {
    let index = ABSOLUTE_POS as u32;
    let row = index / lanes;
    let eight = index % lanes;
    let place = row % pitch;
    let position = position_of(place as usize, &listing, t.residue);
    let head = (row / pitch % heads) as usize;
    let batch = (row / pitch / heads) as usize;
    let exists = row < rows && position < grad_strides.len;
    let out_row = (batch * heads as usize + head) * grad_strides.len + position;
    let mut sum = f32::new(0.0);
    if exists && eight < comptime!(t.dim as u32 / 8) {
        let a = out[out_row * comptime!(t.dim / 8) + eight as usize];
        let b = grad_out[batch * grad_strides.batch
            + head * grad_strides.head
            + position * grad_strides.row
            + eight as usize];
        #[unroll]
        for i in 0..4usize {
            let (x, y) = (a.extract(i), b.extract(i));
            sum = multiply_add(unpack(x, false, t.half), unpack(y, false, t.half), sum);
            sum = multiply_add(unpack(x, true, t.half), unpack(y, true, t.half), sum);
        }
    }
    sum += shuffle_xor(sum, 1u32);
    sum += shuffle_xor(sum, 2u32);
    sum += shuffle_xor(sum, 4u32);
    if comptime!(lanes > 8) {
        sum += shuffle_xor(sum, 8u32);
    }
    if row < rows && eight == 0 {
        let mut log = f32::new(0.0);
        if exists {
            log = lse[out_row];
        }
        // Rows without keys have lse −∞.
        let none = log < f32::new(LOW);
        #[comptime]
        match grad_lse {
            ComptimeOption::Some(grad_lse) => {
                if exists {
                    sum -= select(none, f32::new(0.0), grad_lse[out_row]);
                }
            }
            ComptimeOption::None => {}
        }
        stats[(row * 2) as usize] = select(
            none,
            f32::new(0.0),
            log * comptime!(std::f32::consts::LOG2_E),
        );
        stats[(row * 2 + 1) as usize] = sum;
        clear(counters, row, rows, t);
    }
}

/// Like [`stats`], from the stats of an earlier part, which lists positions in order with `known_pitch` per head.
#[cube(launch_unchecked)]
pub fn relist(
    known: &[Vector<f32, Const<2>>],
    stats: &mut [Vector<f32, Const<2>>],
    counters: &mut [u32],
    listing: Listing,
    rows: u32,
    pitch: u32,
    known_pitch: u32,
    seq_q: u32,
    #[comptime] t: BackwardTile,
) {
    let row = ABSOLUTE_POS as u32;
    let position = position_of((row % pitch) as usize, &listing, t.residue) as u32;
    if row < rows {
        let mut pair = Vector::<f32, Const<2>>::zeroed();
        if position < seq_q {
            pair = known[(row / pitch * known_pitch + position) as usize];
        }
        stats[row as usize] = pair;
        clear(counters, row, rows, t);
    }
}

/// Zeros the counters that begin at a row and, with the first row, the counter of tickets.
#[cube]
fn clear(counters: &mut [u32], row: u32, rows: u32, #[comptime] t: BackwardTile) {
    let parts = comptime!(t.parts() as u32);
    let counted = comptime!(t.counted() as u32);
    let all = rows / counted * parts;
    if row % counted < parts {
        let counter = row / counted * parts + row % counted;
        counters[counter as usize] = 0u32;
        if comptime!(t.apart) {
            counters[(all + counter) as usize] = 0u32;
        }
    }
    if row == 0 {
        counters[(all * comptime!(t.sets() as u32)) as usize] = 0u32;
    }
}

/// Computes dQ `[batch, heads, seq_q, dim]` from the sums. A unit computes eight columns of a row. Queries without visits get zeros. With `apart`, the
/// second scratch is added to the first. With `carry`, dQ is added to the present values.
#[cube(launch_unchecked)]
pub fn finish(
    scratch: &[Vector<f32, Const<2>>],
    counters: &[u32],
    out: &mut [Vector<u32, Const<4>>],
    listing: Listing,
    rows: u32,
    pitch: u32,
    seq_q: u32,
    scale: f32,
    #[comptime] t: BackwardTile,
) {
    let index = ABSOLUTE_POS as u32;
    let eights = comptime!(t.dim as u32 / 8);
    let row = index / eights;
    let eight = index % eights;
    let position = position_of((row % pitch) as usize, &listing, t.residue);
    if row < rows && position < seq_q as usize {
        let part = eight / comptime!((t.padded() / 8 / t.parts()) as u32);
        let counter = row / comptime!(t.counted() as u32) * comptime!(t.parts() as u32) + part;
        let target =
            ((row / pitch * seq_q) as usize + position) * comptime!(t.dim / 8) + eight as usize;
        let mut made = Vector::<u32, Const<4>>::zeroed();
        if comptime!(t.carry) {
            made = out[target];
        }
        let source = (row / 16) as usize * comptime!(t.dq_eight_bytes() / 4)
            + ((part * 2 + row % 16 / 8) * comptime!((t.warp_eight_bytes() / 8) as u32)
                + eight % comptime!((t.padded() / 8 / t.parts()) as u32) / 2 * 64
                + row % 8 * 8
                + eight % 2) as usize;
        let visited = counters[counter as usize] != 0;
        let mut again = false.runtime();
        let mut second = source;
        if comptime!(t.apart) {
            let all = rows / comptime!(t.counted() as u32) * comptime!(t.parts() as u32);
            again = counters[(all + counter) as usize] != 0;
            second += rows as usize * comptime!(t.padded() / 2);
        }
        if visited || again {
            #[unroll]
            for i in 0..4usize {
                let mut pair = Vector::<f32, Const<2>>::zeroed();
                if visited {
                    pair = scratch[source + comptime!(2 * i)];
                }
                if comptime!(t.apart) {
                    if again {
                        pair += scratch[second + comptime!(2 * i)];
                    }
                }
                let mut low = pair.extract(0usize) * scale;
                let mut high = pair.extract(1usize) * scale;
                if comptime!(t.carry) {
                    low += unpack(made.extract(i), false, t.half);
                    high += unpack(made.extract(i), true, t.half);
                }
                made.insert(i, pack(low, high, t.half));
            }
        }
        out[target] = made;
    }
}
