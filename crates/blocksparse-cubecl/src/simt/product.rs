//! The two products, and what is done with their rows: reductions over units, and stores.

use cubecl::prelude::*;

use super::gather::{load_four, store_four};
use super::tile::*;
use crate::shared::addressing::*;

/// `at`, which is less than `end`, said in a way that a compiler sees: then it adds constants to it in the address of a read, where
/// otherwise a sum of 32 bits might wrap and is made apart.
#[cube]
pub fn bounded(at: usize, #[comptime] end: usize) -> usize {
    at % comptime!(end.next_power_of_two())
}

/// `a · bᵀ`: the unit's rows of `a` with its four gathered rows of `b`, into `[unit_rows · 4]`.
#[cube]
pub fn product_rows<A: Float>(
    a: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    unit_y: usize,
    unit_x: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) -> Array<A> {
    let rows = comptime!(t.unit_rows);
    let pitch = comptime!(pitch(dim));
    let mut product = Array::<A>::new(comptime!(rows * 4));
    #[unroll]
    for i in 0..comptime!(rows * 4) {
        product[i] = A::new(0.0);
    }
    let together = comptime!(1 << fours(dim).trailing_zeros().min(2));
    for first in range_stepped(0usize, comptime!(fours(dim)), together) {
        let a_at = bounded(unit_y * rows * pitch + first, comptime!(t.rows * pitch));
        let b_at = bounded(unit_x * pitch + first, comptime!(t.units_x * pitch));
        #[unroll]
        for next in 0..together {
            let mut lhs = Array::<Vector<A, Four>>::new(rows);
            #[unroll]
            for i in 0..rows {
                lhs[i] = a[a_at + comptime!(i * pitch + next)];
            }
            #[unroll]
            for j in 0..4usize {
                let rhs = b[b_at + comptime!(j * t.units_x * pitch + next)];
                #[unroll]
                for i in 0..rows {
                    #[unroll]
                    for c in 0..4usize {
                        product[comptime!(i * 4 + j)] += lhs[i].extract(c) * rhs.extract(c);
                    }
                }
            }
        }
    }
    product
}

/// `acc += w · b`: weights `[rows, cols]` in shared memory with the gathered rows of `b`, into the unit's
/// rows and every `units_x`-th four of the output, `[unit_rows · unit_fours]`. Only of those `halves` of the columns that
/// [`needed`](super::mask::needed) names.
#[cube]
pub fn accumulate_product<A: Float>(
    weights: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    acc: &mut Array<Vector<A, Four>>,
    unit_y: usize,
    unit_x: usize,
    halves: u32,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    if comptime!(t.has_halves()) {
        // The number of rounds is known: where it is not, they cost a tenth more.
        for half in 0..2usize {
            if (halves >> half as u32) & 1u32 == 1u32 {
                #[unroll(t.units_x <= 8)]
                for col in 0..comptime!(t.units_x / 2) {
                    let col = half * comptime!(t.units_x / 2) + col;
                    accumulate_fours(weights, b, acc, unit_y, unit_x, col, dim, t);
                }
            }
        }
    } else {
        for col in 0..comptime!(t.units_x) {
            accumulate_fours(weights, b, acc, unit_y, unit_x, col, dim, t);
        }
    }
}

/// [`accumulate_product`] of four columns.
#[cube]
fn accumulate_fours<A: Float>(
    weights: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    acc: &mut Array<Vector<A, Four>>,
    unit_y: usize,
    unit_x: usize,
    col: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let rows = comptime!(t.unit_rows);
    let pitch = comptime!(pitch(dim));
    let fours = comptime!(fours(dim));
    let unit_fours = comptime!(t.unit_fours(dim));
    let weight_pitch = comptime!(t.weight_pitch());
    let weights_at = bounded(
        unit_y * rows * weight_pitch + col,
        comptime!(t.rows * weight_pitch),
    );
    let b_at = bounded(col * pitch + unit_x, comptime!(t.units_x * pitch));
    let mut lhs = Array::<Vector<A, Four>>::new(rows);
    #[unroll]
    for i in 0..rows {
        lhs[i] = weights[weights_at + comptime!(i * weight_pitch)];
    }
    #[unroll]
    for j in 0..4usize {
        #[unroll]
        for f in 0..unit_fours {
            let mut at = b_at + comptime!(j * t.units_x * pitch + f * t.units_x);
            // A unit past the row's end repeats its last four, and stores nothing of it.
            if comptime!(fours % t.units_x != 0) {
                let four = unit_x + comptime!(f * t.units_x);
                at = (comptime!(j * t.units_x) + col) * pitch + four.min(comptime!(fours - 1));
            }
            let rhs = b[at];
            #[unroll]
            for i in 0..rows {
                let at = comptime!(i * unit_fours + f);
                acc[at] += Vector::new(lhs[i].extract(j)) * rhs;
            }
        }
    }
}

/// For each of the unit's rows, the largest (`max`) or the sum over the units of the row.
#[cube]
pub fn reduce_rows<A: Float>(
    values: &mut Array<A>,
    scratch: &mut Shared<[A]>,
    unit_y: usize,
    unit_x: usize,
    #[comptime] max: bool,
    #[comptime] t: Tile,
) {
    let rows = comptime!(t.unit_rows);
    if comptime!(t.planes) {
        #[unroll]
        for i in 0..rows {
            #[unroll]
            for step in 0..comptime!(t.units_x.ilog2()) {
                let other = plane_shuffle_xor(values[i], comptime!(1u32 << step));
                values[i] = combine::<A>(values[i], other, max);
            }
        }
    } else {
        #[unroll]
        for i in 0..rows {
            scratch[(unit_y * rows + i) * comptime!(t.units_x) + unit_x] = values[i];
        }
        sync_cube();
        #[unroll]
        for i in 0..rows {
            let base = (unit_y * rows + i) * comptime!(t.units_x);
            let mut result = scratch[base];
            for other in 1..comptime!(t.units_x) {
                result = combine::<A>(result, scratch[base + other], max);
            }
            values[i] = result;
        }
        sync_cube();
    }
}

#[cube]
fn combine<A: Float>(a: A, b: A, #[comptime] max: bool) -> A {
    if comptime!(max) { a.max(b) } else { a + b }
}

/// Makes what the units of a row wrote to shared memory visible to them.
#[cube]
pub fn sync_row(#[comptime] t: Tile) {
    if comptime!(t.planes) {
        sync_plane();
    } else {
        sync_cube();
    }
}

/// Scales the unit's part of an output row and adds what is there. A tile reads all rows before it stores one: a read behind a store to
/// the same tensor would wait for it. `row` is in vectors.
#[cube]
pub fn add_row<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    row: usize,
    acc: &mut Array<Vector<A, Four>>,
    factor: A,
    unit_x: usize,
    #[comptime] unit_row: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let unit_fours = comptime!(t.unit_fours(dim));
    #[unroll]
    for f in 0..unit_fours {
        let at = comptime!(unit_row * unit_fours + f);
        let four = unit_x + comptime!(f * t.units_x);
        acc[at] = acc[at] * Vector::new(factor) + load_four::<E, A, N>(source, row, four, dim);
    }
}

/// Writes the unit's part of an output row, scaled and narrowed to `E`. `row` is in vectors.
#[cube]
pub fn store_row<E: Float, A: Float, N: Size>(
    target: &mut [Vector<E, N>],
    row: usize,
    acc: &Array<Vector<A, Four>>,
    factor: A,
    unit_x: usize,
    #[comptime] unit_row: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let unit_fours = comptime!(t.unit_fours(dim));
    #[unroll]
    for f in 0..unit_fours {
        let four = unit_x + comptime!(f * t.units_x);
        let value = acc[comptime!(unit_row * unit_fours + f)] * Vector::new(factor);
        store_four::<E, A, N>(target, row, four, value, dim);
    }
}
