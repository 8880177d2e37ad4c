//! Rows in shared memory as vectors of four, and their products.

use cubecl::prelude::*;

use blocksparse_cubecl::shared::addressing::Four;
use blocksparse_cubecl::simt::gather::load_four;

/// Number of units across a tile's columns. Unit i has every `ACROSS`-th column from i on.
pub(crate) const ACROSS: usize = 16;
/// Number of columns of a tile, and maximum number of rows of a gradient's tile.
pub(crate) const SIDE: usize = 64;
/// Number of vectors of four of a row in shared memory at a time.
pub(crate) const DEPTH: usize = 4;
/// Vectors from one row to the next in shared memory: odd, so that adjacent rows use different banks.
pub(crate) const PITCH: usize = DEPTH + 1;

/// Copies a vector of four of a row to shared memory, or zeros if the row is absent.
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

/// Accumulates the products of a unit's `own` rows with its four columns, over the depth that is in shared memory.
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
