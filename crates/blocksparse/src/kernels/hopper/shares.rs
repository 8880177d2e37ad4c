//! The sums of cubes that share the queries of a tile of keys.
//!
//! A cube of the fused backward pass has a tile of keys and all query heads that share them. Few keys make few cubes, and under a causal
//! mask the first tile has twice the queries of the mean: then the longest cube is the time of the pass. So cubes share the query heads of a
//! tile ([`balance`](super::balance) says how many), each writes its sums of dK and dV in f32, and [`fold`] adds them up in order.
//!
//! ```text
//! sums   [shares, dK | dV, batch, kv_heads, seq_kv, columns]     columns: the width in whole 32
//!        of 32 columns a unit has two of each eight, and writes its eight side by side: 8 · pair + 2 · eight + (column mod 2)
//! ```

use cubecl::prelude::*;

use super::asm::*;
use super::gradient::{StoreShape, row_position};
use super::tiles::BackwardTile;
use crate::kernels::shared::walk::{Four, Listing};

/// Stores the unit's two rows of sums, those of row `first` at the first position. They are factors of what is in `acc`.
#[cube]
pub fn store_sums<O: Size>(
    sums: &mut [Vector<u32, Four>],
    acc: &Vector<f32, O>,
    first: u32,
    place: u32,
    place8: u32,
    listing: &Listing,
    len: u32,
    lane: u32,
    factor: f32,
    #[comptime] t: StoreShape,
) {
    let fours = comptime!(t.dim.div_ceil(32) * 8);
    let upper = row_position(place, listing, len, t.residue);
    let lower = row_position(place8, listing, len, t.residue);
    let own = (lane % 4 * 2) as usize;
    let at = (first + upper.at) as usize * fours + own;
    let at8 = (first + lower.at) as usize * fours + own;
    #[unroll]
    for i in 0..comptime!(t.dim.div_ceil(32)) {
        #[unroll]
        for half in 0..2usize {
            let column = comptime!(8 * i + half);
            if upper.exists {
                sums[at + column] = four_sums::<O>(acc, comptime!(16 * i + 8 * half), factor);
            }
            if lower.exists {
                sums[at8 + column] = four_sums::<O>(acc, comptime!(16 * i + 8 * half + 2), factor);
            }
        }
    }
}

/// Two neighbours of one eight, and two of the next.
#[cube]
fn four_sums<O: Size>(
    acc: &Vector<f32, O>,
    #[comptime] n: usize,
    factor: f32,
) -> Vector<u32, Four> {
    let mut four = Vector::<u32, Four>::zeroed();
    #[unroll]
    for i in 0..4usize {
        let sum = acc.extract(comptime!(n + i / 2 * 4 + i % 2)) * factor;
        four.insert(i, u32::reinterpret(sum));
    }
    four
}

/// dK and dV from the sums of all shares: a unit makes eight columns of a row, of `rows` of each. dV begins at vector `second`. With
/// `carry` they are added to what is there.
#[cube(launch_unchecked)]
pub fn fold(
    sums: &[Vector<f32, Const<2>>],
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
        let pairs = comptime!(t.sum_columns() / 2);
        let at = row as usize * pairs + (eight / 4 * 16 + eight % 4) as usize;
        let between = 2 * rows as usize * pairs;
        let mut own = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            own[i] = f32::new(0.0);
        }
        for share in 0..comptime!(t.shares) {
            #[unroll]
            for i in 0..4usize {
                let pair = sums[at + share * between + comptime!(4 * i)];
                own[comptime!(2 * i)] += pair.extract(0usize);
                own[comptime!(2 * i + 1)] += pair.extract(1usize);
            }
        }
        let mut target = (row * eights + eight) as usize;
        if row >= rows {
            target = second as usize + ((row - rows) * eights + eight) as usize;
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
}
