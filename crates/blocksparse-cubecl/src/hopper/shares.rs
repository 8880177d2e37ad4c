//! Sums of cubes that share the queries of a tile of keys.
//!
//! A cube of the fused backward pass has a tile of keys and all query heads that share them. Few keys make few cubes, and under a causal mask the first
//! tile has twice the mean number of queries, so the longest cube determines the time of the pass. So several cubes share the query heads of a tile
//! ([`balance`](super::balance) chooses how many). Each writes its sums of dK and dV in f32, and [`fold`] adds them up in order.
//!
//! ```text
//! sums   [shares, dK | dV, batch, kv_heads, seq_kv, width]
//! ```

use cubecl::prelude::*;

use super::base::Base;
use super::gradient::{StoredRows, row_position, store_rows};
use super::tiles::BackwardTile;
use crate::arch::sm90::*;
use crate::shared::addressing::Four;

/// Stores the unit's two rows of a gradient, or of a share's sums of it. The gradient begins at vector `start`.
#[cube]
pub fn store_gradient<O: Size>(
    out: &mut [Vector<u32, Four>],
    acc: &Vector<f32, O>,
    start: u32,
    first: u32,
    rows: &StoredRows,
    factor: f32,
    #[comptime] t: BackwardTile,
) {
    if comptime!(t.shares > 1) {
        let sums = global_address::<Vector<u32, Four>>(&*out);
        store_sums::<O>(sums, acc, first, rows, factor, t.base);
    } else {
        store_rows::<O>(out, acc, start, first, rows, factor, t.base);
    }
}

/// Stores the unit's two rows of sums times a factor. The first position is row `first` of `sums`. A unit has two columns of each group of eight, and
/// stores pairs. For stores of 16 bytes, ptxas would move the sums to four adjacent registers, even in the mainloop.
#[cube]
pub fn store_sums<O: Size>(
    sums: u64,
    acc: &Vector<f32, O>,
    first: u32,
    rows: &StoredRows,
    factor: f32,
    #[comptime] t: Base,
) {
    let upper = row_position(rows.place, &rows.listing, rows.len, t.residue);
    let lower = row_position(rows.place8, &rows.listing, rows.len, t.residue);
    let start = sums + u64::cast_from(rows.lane % 4 * 8);
    let at = start + u64::cast_from(first + upper.position) * comptime!(t.dim as u64 * 4);
    let at8 = start + u64::cast_from(first + lower.position) * comptime!(t.dim as u64 * 4);
    #[unroll]
    for eight in 0..comptime!(t.dim / 8) {
        let n = comptime!(4 * eight);
        let offset = comptime!(eight as u64 * 32);
        if upper.exists {
            let (a, b) = (acc.extract(n), acc.extract(comptime!(n + 1)));
            store_pair(at + offset, a * factor, b * factor);
        }
        if lower.exists {
            let (a, b) = (acc.extract(comptime!(n + 2)), acc.extract(comptime!(n + 3)));
            store_pair(at8 + offset, a * factor, b * factor);
        }
    }
}

/// Computes dK and dV from the sums of all shares. A unit computes eight columns of a row. Both have `rows` rows, and dV begins at vector `second`. With
/// `carry`, they are added to the present values.
#[cube(launch_unchecked)]
pub fn fold(
    sums: &[Vector<f32, Four>],
    out: &mut [Vector<u32, Four>],
    rows: u32,
    second: u32,
    #[comptime] t: BackwardTile,
) {
    let index = ABSOLUTE_POS as u32;
    let eights = comptime!(t.dim as u32 / 8);
    let row = index / eights;
    let eight = index % eights;
    if row < 2 * rows {
        let at = (row * eights + eight) as usize * 2;
        let between = (2 * rows * eights) as usize * 2;
        let mut target = (row * eights + eight) as usize;
        if row >= rows {
            target = second as usize + ((row - rows) * eights + eight) as usize;
        }
        let shares = comptime!(t.shares).runtime();
        fold_eight(sums, out, at, between, shares, target, t.base);
    }
}

/// Adds up eight numbers of each of `shares` shares in order, and stores them at vector `target`. A share's numbers are at vector `at`, `between` vectors
/// after the previous share's. With `carry`, they are added to the present values.
#[cube]
pub fn fold_eight(
    sums: &[Vector<f32, Four>],
    out: &mut [Vector<u32, Four>],
    at: usize,
    between: usize,
    shares: usize,
    target: usize,
    #[comptime] t: Base,
) {
    let mut own = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        own[i] = f32::new(0.0);
    }
    for share in 0..shares {
        #[unroll]
        for half in 0..2usize {
            let four = sums[at + share * between + half];
            #[unroll]
            for i in 0..4usize {
                own[comptime!(4 * half + i)] += four.extract(i);
            }
        }
    }
    let mut made = Vector::<u32, Four>::zeroed();
    if comptime!(t.carry) {
        made = out[target];
    }
    #[unroll]
    for i in 0..4usize {
        let mut low = own[comptime!(2 * i)];
        let mut high = own[comptime!(2 * i + 1)];
        if comptime!(t.carry) {
            low += unpack(made.extract(i), false, t.half);
            high += unpack(made.extract(i), true, t.half);
        }
        made.insert(i, pack(low, high, t.half));
    }
    out[target] = made;
}
