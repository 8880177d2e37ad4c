//! Dropout of weights: the mask of [`Dropout`](crate::Dropout), made again wherever it is needed.

use cubecl::prelude::*;

use super::score::{Positions, pair_at};
use super::tile::*;
use crate::kernels::shared::dropout::{Mask, words};
use crate::plan::Walk;

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
