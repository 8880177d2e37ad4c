//! Top-k epilogue: writes the columns of each row's highest scores, of the columns that the row may choose. Scores are not written.
//!
//! A unit holds two of every eight columns of a row and keeps the highest of its own. At the end the four units of a row select the highest of theirs one by
//! one. All columns are in one tile.

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use crate::kernels::linear::epilogue::{Lane, Place, ResultShape};
use crate::kernels::linear::log_sums::Seen;
use crate::kernels::linear::tile::{Highest, ProductTile};
use blocksparse_cubecl::arch::ptx::shuffle_xor;
use blocksparse_cubecl::shared::order_key::key;

/// Marks an empty entry; no score has this index.
const NOTHING: u32 = u32::MAX;

/// Returns score `i` of the unit's upper row, or of its `lower` one.
#[cube]
fn score_of<S: Size>(
    sums: &Vector<f32, S>,
    #[comptime] i: usize,
    #[comptime] lower: usize,
    #[comptime] of: Highest,
) -> f32 {
    if comptime!(of.parts == 2) {
        let at = comptime!(4 * i + 2 * lower);
        sums.extract(at) + sums.extract(comptime!(at + 1))
    } else {
        sums.extract(comptime!(i / 2 * 4 + 2 * lower + i % 2))
    }
}

/// Returns the index in its row of a unit's score `i`.
#[cube]
fn name_of(quarter: u32, #[comptime] i: usize, #[comptime] of: Highest) -> u32 {
    if comptime!(of.parts == 2) {
        quarter + comptime!(4 * i as u32)
    } else {
        quarter * 2 + comptime!((i / 2 * 8 + i % 2) as u32)
    }
}

/// Writes the indices of each row's highest scores in descending order, equal scores by ascending index: `[batch, rows, most]`, i32, −1 where there are
/// fewer.
#[cube]
pub fn store_highest<S: Size, W: Size>(
    out: &mut [Vector<u32, W>],
    sums: &Vector<f32, S>,
    place: &Place,
    shape: &ResultShape,
    seen: &Seen,
    own: &Lane,
    #[comptime] t: ProductTile,
) {
    let of = comptime!(t.highest());
    let most = comptime!(of.most);
    let quarter = own.lane % 4;
    #[unroll]
    for lower in 0..2usize {
        let row = place.row + own.row() + comptime!(8 * lower as u32);
        let position = max(seen.first + row as i32, 0i32) as u32;
        let candidates = min(position / comptime!(of.step as u32), seen.columns);
        let mut keys = Array::<u32>::new(most);
        let mut names = Array::<u32>::new(most);
        #[unroll]
        for i in 0..most {
            keys[i] = 0u32.runtime();
            names[i] = comptime!(NOTHING).runtime();
        }
        #[unroll]
        for i in 0..comptime!(t.cols / 4 / of.parts) {
            let score = score_of::<S>(sums, i, lower, of);
            let mut name = name_of(quarter, i, of);
            // Key 0 is below all kept ones: a column that the row may not choose is never inserted.
            let mut its = select(name < candidates, key(u32::reinterpret(score)), 0u32);
            let mut is_in = false.runtime();
            #[unroll]
            for n in 0..most {
                // From its position on, all entries move down.
                let (here, other) = (keys[n], names[n]);
                is_in = is_in || its > here;
                keys[n] = select(is_in, its, here);
                names[n] = select(is_in, name, other);
                its = select(is_in, here, its);
                name = select(is_in, other, name);
            }
        }
        let start = (place.matrix * shape.rows + row) as usize * most;
        #[unroll]
        for n in 0..most {
            let mut best = keys[0];
            let mut its = names[0];
            #[unroll]
            for distance in 0..2usize {
                let mask = comptime!(1u32 << distance);
                let other = u32::reinterpret(shuffle_xor(f32::reinterpret(best), mask));
                let whose = u32::reinterpret(shuffle_xor(f32::reinterpret(its), mask));
                let is_higher = other > best || (other == best && whose < its);
                best = select(is_higher, other, best);
                its = select(is_higher, whose, its);
            }
            // The unit whose entry was selected removes it.
            let is_own = its == names[0];
            #[unroll]
            for i in 0..comptime!(most - 1) {
                keys[i] = select(is_own, keys[comptime!(i + 1)], keys[i]);
                names[i] = select(is_own, names[comptime!(i + 1)], names[i]);
            }
            keys[comptime!(most - 1)] = select(is_own, 0u32, keys[comptime!(most - 1)]);
            names[comptime!(most - 1)] = select(
                is_own,
                comptime!(NOTHING).runtime(),
                names[comptime!(most - 1)],
            );
            if quarter == comptime!(n as u32 % 4) {
                if row < shape.rows {
                    let mut word = Vector::<u32, W>::zeroed();
                    word.insert(0usize, its);
                    out[start + n] = word;
                }
            }
        }
    }
}
