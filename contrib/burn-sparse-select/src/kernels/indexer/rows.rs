//! Rows of numbers in shared memory, four numbers to a place, and their products.

use cubecl::prelude::*;

use blocksparse_cubecl::shared::addressing::Four;
use blocksparse_cubecl::simt::gather::load_four;

/// Units across a tile's columns, of which each has every so many-th.
pub(crate) const ACROSS: usize = 16;
/// Columns of a tile, and of a gradient's tile also rows, at most.
pub(crate) const SIDE: usize = 64;
/// Fours of a row that are in shared memory at a time.
pub(crate) const DEPTH: usize = 4;
/// Fours between two rows there: odd, so that neighbouring rows lie in different banks.
pub(crate) const PITCH: usize = DEPTH + 1;

/// Copies a four of a row to a place in shared memory: zeros of what is not there.
#[cube]
pub(crate) fn fill<E: Float, N: Size>(
    source: &[Vector<E, N>],
    shared: &mut Shared<[Vector<f32, Four>]>,
    place: usize,
    start: usize,
    four: usize,
    is_there: bool,
    #[comptime] width: usize,
) {
    let mut value = Vector::<f32, Four>::zeroed();
    if is_there {
        value = load_four::<E, f32, N>(source, start / N::value(), four, width);
    }
    shared[place] = value;
}

/// Adds the products of a unit's `own` rows with its four columns, of as many fours as there are in shared memory.
#[cube]
pub(crate) fn multiply(
    left: &Shared<[Vector<f32, Four>]>,
    right: &Shared<[Vector<f32, Four>]>,
    products: &mut Array<f32>,
    first_row: usize,
    first_column: usize,
    #[comptime] own: usize,
    #[comptime] across: usize,
) {
    #[unroll]
    for four in 0..comptime!(DEPTH) {
        let mut lhs = Array::<Vector<f32, Four>>::new(own);
        #[unroll]
        for i in 0..own {
            lhs[i] = left[first_row * comptime!(PITCH) + comptime!(i * PITCH + four)];
        }
        #[unroll]
        for j in 0..4usize {
            let rhs = right[first_column * comptime!(PITCH) + comptime!(j * across * PITCH + four)];
            #[unroll]
            for i in 0..own {
                #[unroll]
                for c in 0..4usize {
                    products[comptime!(i * 4 + j)] += lhs[i].extract(c) * rhs.extract(c);
                }
            }
        }
    }
}
