//! The two products of attention, reductions of their rows over units, and stores.

use cubecl::prelude::*;

use super::gather::{load_four, store_four};
use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::row_tile::{Combine, combine};

/// Returns `at`, which is less than `end`, in a form that shows the bound to the compiler. Then it can fold added constants into the address of a read.
/// Without the bound, a 32-bit sum might wrap and takes an instruction of its own.
#[cube]
pub fn bounded(at: usize, #[comptime] end: usize) -> usize {
    at % comptime!(end.next_power_of_two())
}

/// Computes `a · bᵀ` of the unit's rows of `a` and its four gathered rows of `b`, `[unit_rows · 4]`.
#[cube]
pub fn product_rows<A: Float>(
    a: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    unit: &Unit,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) -> Array<A> {
    let rows = comptime!(t.unit_rows);
    let pitch = comptime!(pitch(dim));
    let mut product = no_numbers::<A>(comptime!(rows * 4));
    let together = comptime!(1 << fours(dim).trailing_zeros().min(2));
    for first in range_stepped(0usize, comptime!(fours(dim)), together) {
        let a_at = bounded(unit.y * rows * pitch + first, comptime!(t.rows * pitch));
        let b_at = bounded(unit.x * pitch + first, comptime!(t.units_x * pitch));
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

/// Adds `w · b` to `acc`, with weights `[rows, cols]` in shared memory and the gathered rows of `b`. The result is the unit's rows and every `units_x`-th
/// vector of four of the output, `[unit_rows · unit_fours]`. Only the `halves` of the columns that [`needed`](super::mask::needed) returns are added.
#[cube]
pub fn accumulate_product<A: Float>(
    weights: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    acc: &mut Array<Vector<A, Four>>,
    unit: &Unit,
    halves: u32,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    if comptime!(t.has_halves()) {
        // The trip count is a compile-time constant. Without that, the loop takes 10% longer.
        for half in 0..2usize {
            if (halves >> half as u32) & 1u32 == 1u32 {
                #[unroll(t.units_x <= 8)]
                for col in 0..comptime!(t.units_x / 2) {
                    let col = half * comptime!(t.units_x / 2) + col;
                    accumulate_fours(weights, b, acc, unit, col, dim, t);
                }
            }
        }
    } else {
        for col in 0..comptime!(t.units_x) {
            accumulate_fours(weights, b, acc, unit, col, dim, t);
        }
    }
}

/// Like [`accumulate_product`], for four columns.
#[cube]
fn accumulate_fours<A: Float>(
    weights: &Shared<[Vector<A, Four>]>,
    b: &Shared<[Vector<A, Four>]>,
    acc: &mut Array<Vector<A, Four>>,
    unit: &Unit,
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
        unit.y * rows * weight_pitch + col,
        comptime!(t.rows * weight_pitch),
    );
    let b_at = bounded(col * pitch + unit.x, comptime!(t.units_x * pitch));
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
            // A unit past the end of the row repeats its last vector, and does not store it.
            if comptime!(fours % t.units_x != 0) {
                let four = unit.x + comptime!(f * t.units_x);
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

/// Number of shared elements that [`reduce_rows`] needs.
pub fn scratch_len(t: Tile) -> usize {
    match t.planes {
        true => 1,
        false => t.rows * t.units_x,
    }
}

/// Returns zeros.
#[cube]
pub fn no_numbers<A: Float>(#[comptime] count: usize) -> Array<A> {
    let mut sums = Array::<A>::new(count);
    #[unroll]
    for i in 0..count {
        sums[i] = A::new(0.0);
    }
    sums
}

/// Returns zero vectors.
#[cube]
pub fn no_fours<A: Float>(#[comptime] fours: usize) -> Array<Vector<A, Four>> {
    let mut sums = Array::<Vector<A, Four>>::new(fours);
    #[unroll]
    for i in 0..fours {
        sums[i] = Vector::<A, Four>::zeroed();
    }
    sums
}

/// Reduces `values`, one per row of the unit, over the units of each row.
#[cube]
pub fn reduce_rows<A: Float>(
    values: &mut Array<A>,
    scratch: &mut Shared<[A]>,
    unit: &Unit,
    #[comptime] by: Combine,
    #[comptime] t: Tile,
) {
    let rows = comptime!(t.unit_rows);
    if comptime!(t.planes) {
        #[unroll]
        for i in 0..rows {
            #[unroll]
            for step in 0..comptime!(t.units_x.ilog2()) {
                let other = plane_shuffle_xor(values[i], comptime!(1u32 << step));
                values[i] = combine::<A>(values[i], other, by);
            }
        }
    } else {
        #[unroll]
        for i in 0..rows {
            scratch[(unit.y * rows + i) * comptime!(t.units_x) + unit.x] = values[i];
        }
        sync_cube();
        #[unroll]
        for i in 0..rows {
            let base = (unit.y * rows + i) * comptime!(t.units_x);
            let mut result = scratch[base];
            for other in 1..comptime!(t.units_x) {
                result = combine::<A>(result, scratch[base + other], by);
            }
            values[i] = result;
        }
        sync_cube();
    }
}

/// Makes writes to shared memory visible to the units of the same row.
#[cube]
pub fn sync_row(#[comptime] t: Tile) {
    if comptime!(t.planes) {
        sync_plane();
    } else {
        sync_cube();
    }
}

/// Scales the unit's rows of an output and adds the present values, from vector `start` on. A tile reads all rows before it stores any, because a read
/// after a store to the same tensor would wait for it.
#[cube]
pub fn add_rows_of<E: Float, A: Float, N: Size>(
    source: &[Vector<E, N>],
    start: usize,
    acc: &mut Array<Vector<A, Four>>,
    factor: A,
    own: &UnitRows,
    unit: &Unit,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let unit_fours = comptime!(t.unit_fours(dim));
    let width = N::value();
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        let row = own.span.first + i * own.span.step;
        let row = own.first + row.min(own.len - 1);
        #[unroll]
        for f in 0..unit_fours {
            let at = comptime!(i * unit_fours + f);
            let four = unit.x + comptime!(f * t.units_x);
            let vector = start + row * comptime!(dim / width);
            let before = load_four::<E, A, N>(source, vector, four, dim);
            acc[at] = acc[at] * Vector::new(factor) + before;
        }
    }
}

/// Writes the unit's rows of an output from vector `start` on, scaled and narrowed to `E`.
#[cube]
pub fn store_rows<E: Float, A: Float, N: Size>(
    target: &mut [Vector<E, N>],
    start: usize,
    acc: &Array<Vector<A, Four>>,
    factor: A,
    own: &UnitRows,
    unit: &Unit,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let width = N::value();
    #[unroll]
    for i in 0..comptime!(t.unit_rows) {
        let row = own.span.first + i * own.span.step;
        if row < own.len {
            let vector = start + (own.first + row) * comptime!(dim / width);
            store_row::<E, A, N>(target, vector, acc, factor, unit, i, dim, t);
        }
    }
}

/// Writes the unit's part of an output row, scaled and narrowed to `E`. `row` is in vectors.
#[cube]
pub fn store_row<E: Float, A: Float, N: Size>(
    target: &mut [Vector<E, N>],
    row: usize,
    acc: &Array<Vector<A, Four>>,
    factor: A,
    unit: &Unit,
    #[comptime] unit_row: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let unit_fours = comptime!(t.unit_fours(dim));
    #[unroll]
    for f in 0..unit_fours {
        let four = unit.x + comptime!(f * t.units_x);
        let value = acc[comptime!(unit_row * unit_fours + f)] * Vector::new(factor);
        store_four::<E, A, N>(target, row, four, value, dim);
    }
}
