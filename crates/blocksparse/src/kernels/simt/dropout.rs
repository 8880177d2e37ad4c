//! Dropout of weights: the mask of [`Dropout`](crate::Dropout), made again wherever it is needed.

use cubecl::prelude::*;

use super::score::{Positions, pair_at};
use super::tile::*;
use crate::dropout::{MULTIPLIERS, ROUNDS, WEYL};
use crate::plan::Walk;

/// The generator's key, and what keeps a pair.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Mask {
    /// Lower half of the seed.
    pub seed_low: u32,
    /// Its upper half.
    pub seed_high: u32,
    /// Words below it keep their pair.
    pub threshold: u32,
}

/// The words of a query and of the keys from `4 · four` on.
#[cube]
pub fn words(mask: &Mask, batch: usize, head: usize, query: usize, four: usize) -> Array<u32> {
    let mut c0 = u32::cast_from(query);
    let mut c1 = u32::cast_from(four);
    let mut c2 = u32::cast_from(head);
    let mut c3 = u32::cast_from(batch);
    let mut k0 = mask.seed_low;
    let mut k1 = mask.seed_high;
    for _ in 0..comptime!(ROUNDS) {
        let m0 = u32::new(comptime!(MULTIPLIERS[0] as i64));
        let m1 = u32::new(comptime!(MULTIPLIERS[1] as i64));
        let high0 = m0.mul_hi(c0);
        let low0 = m0 * c0;
        let high1 = m1.mul_hi(c2);
        let low1 = m1 * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += u32::new(comptime!(WEYL[0] as i64));
        k1 += u32::new(comptime!(WEYL[1] as i64));
    }
    let mut words = Array::<u32>::new(4usize);
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
    words
}

/// The factors of the unit's pairs, `[unit_rows · 4]`: `factor` or 0.
#[cube]
pub fn factors<A: Float>(
    mask: &Mask,
    factor: A,
    positions: &Positions,
    batch: usize,
    head: usize,
    #[comptime] walk: Walk,
    #[comptime] t: Tile,
) -> Array<A> {
    let rows = comptime!(t.unit_rows);
    let mut factors = Array::<A>::new(comptime!(rows * 4));
    let zero = A::new(0.0);
    // Four keys side by side have one counter, unless they are listed by residue class.
    if comptime!(!t.residue && matches!(walk, Walk::Rows)) {
        #[unroll]
        for i in 0..rows {
            let four = positions.cols[0] / 4;
            let words = words(mask, batch, head, positions.rows[i], four);
            #[unroll]
            for j in 0..4usize {
                factors[comptime!(4 * i + j)] = select(words[j] < mask.threshold, factor, zero);
            }
        }
    } else if comptime!(!t.residue && t.unit_rows.is_multiple_of(4)) {
        #[unroll]
        for first in 0..comptime!(rows / 4) {
            #[unroll]
            for j in 0..4usize {
                let four = positions.rows[comptime!(4 * first)] / 4;
                let words = words(mask, batch, head, positions.cols[j], four);
                #[unroll]
                for i in 0..4usize {
                    factors[comptime!(4 * (4 * first + i) + j)] =
                        select(words[i] < mask.threshold, factor, zero);
                }
            }
        }
    } else {
        #[unroll]
        for i in 0..rows {
            #[unroll]
            for j in 0..4usize {
                let pair = pair_at(positions, i, j, walk);
                let words = words(mask, batch, head, pair.query, pair.key / 4);
                factors[comptime!(4 * i + j)] =
                    select(words[pair.key % 4] < mask.threshold, factor, zero);
            }
        }
    }
    factors
}
