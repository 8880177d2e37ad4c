//! Dropout of weights: the mask of [`Dropout`](blocksparse::Dropout), recomputed wherever it is needed.

use cubecl::prelude::*;

use super::score::{Positions, pair_at};
use super::tile::*;
use crate::shared::dropout::{DropoutArgs, kept_eight};

/// Returns the dropout factors of the unit's pairs, `[unit_rows · 4]`: that of kept pairs, or 0. Unset without dropout.
#[cube]
pub fn factors<A: Float>(
    dropout: &DropoutArgs<InputScalar>,
    positions: &Positions,
    batch: usize,
    head: usize,
    #[comptime] t: Tile,
) -> Array<A> {
    let count = comptime!(if t.score.dropout { t.unit_rows * 4 } else { 1 });
    let mut factors = Array::<A>::new(count);
    let rows = comptime!(if t.score.dropout { t.unit_rows } else { 0 });
    let (mask, batch, head) = (&dropout.mask, batch as u32, head as u32);
    let factor = dropout.factor.get::<A>();
    let zero = A::new(0.0);
    // Eight consecutive keys share a counter, unless positions are listed by residue class.
    if comptime!(!t.residue && !t.columns()) {
        #[unroll]
        for i in 0..rows {
            let key = positions.cols[0] as u32;
            let query = positions.rows[i] as u32;
            let kept = kept_eight(mask, batch, head, query, key / 8) >> (key % 8);
            #[unroll]
            for j in 0..4usize {
                let bit = kept & comptime!(1u32 << j) != 0;
                factors[comptime!(4 * i + j)] = select(bit, factor, zero);
            }
        }
    } else if comptime!(!t.residue && t.unit_rows.is_multiple_of(4)) {
        let side_by_side = comptime!(if t.unit_rows.is_multiple_of(8) { 8 } else { 4 });
        #[unroll]
        for first in 0..comptime!(rows / side_by_side) {
            #[unroll]
            for j in 0..4usize {
                let key = positions.rows[comptime!(side_by_side * first)] as u32;
                let query = positions.cols[j] as u32;
                let kept = kept_eight(mask, batch, head, query, key / 8) >> (key % 8);
                #[unroll]
                for i in 0..side_by_side {
                    let bit = kept & comptime!(1u32 << i) != 0;
                    factors[comptime!(4 * (side_by_side * first + i) + j)] =
                        select(bit, factor, zero);
                }
            }
        }
    } else {
        #[unroll]
        for i in 0..rows {
            #[unroll]
            for j in 0..4usize {
                let pair = pair_at(positions, i, j, t);
                let (query, key) = (pair.query as u32, pair.key as u32);
                let kept = kept_eight(mask, batch, head, query, key / 8) >> (key % 8);
                factors[comptime!(4 * i + j)] = select(kept & 1 != 0, factor, zero);
            }
        }
    }
    factors
}
