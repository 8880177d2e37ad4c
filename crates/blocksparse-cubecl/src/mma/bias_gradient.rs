//! The gradient of a bias tensor: the gradient of the scores, pair by pair or summed over queries.

use cubecl::prelude::*;

use super::score::BiasStrides;
use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::Four;

/// Location of a head's gradient, which has the shape of the bias, in f32.
#[derive(CubeType, Clone, Copy)]
pub struct GradientRows {
    address: u64,
    /// Stride of queries in bytes.
    row: u64,
}

#[cube]
pub fn gradient_rows(
    gradient: &[u32],
    strides: &BiasStrides,
    batch: u32,
    head: u32,
    #[comptime] t: Tile,
) -> GradientRows {
    let mut rows = GradientRows {
        address: u64::cast_from(0u32),
        row: u64::cast_from(0u32),
    };
    if comptime!(t.bias_gradient) {
        // The strides are in bytes of the bias's elements, the gradient is in f32.
        let numbers = comptime!(4 / t.element.bytes() as u64);
        let at = u64::cast_from(batch) * strides.batch + u64::cast_from(head) * strides.head;
        rows.address = address::<u32>(gradient) + at * numbers;
        rows.row = u64::cast_from(strides.row) * numbers;
    }
    rows
}

/// Adds a step's gradients of scores `ds` to those of the bias. `rows` and `cols` are the addresses of the positions of the unit's first query and first
/// key. Pairs that are not computed have weight `p` 0; their positions may duplicate others.
#[cube]
pub fn add_pairs(
    p: &Array<Vector<f32, Four>>,
    ds: &Array<Vector<f32, Four>>,
    gradient: &GradientRows,
    rows: u32,
    cols: u32,
    #[comptime] t: Tile,
) {
    let tiles = comptime!(t.warp_tiles);
    let mut starts = Array::<u64>::new(comptime!(2 * tiles));
    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        let row = shared_load(rows + comptime!(i as u32 * ROW_PAIR * 4));
        starts[i] = gradient.address + u64::cast_from(row) * gradient.row;
    }
    #[unroll]
    for n in 0..comptime!(t.eights()) {
        let positions = shared_load_pair(cols + comptime!(n as u32 * 32));
        #[unroll]
        for j in 0..2usize {
            let offset = u64::cast_from(positions.extract(j)) * 4;
            #[unroll]
            for i in 0..comptime!(2 * tiles) {
                let at = comptime!(i / 2 * t.eights() + n);
                let place = comptime!(i % 2 * 2 + j);
                let computed = p[at].extract(place) > 0.0f32;
                add_number(
                    starts[i] + offset,
                    ds[at].extract(place),
                    u32::cast_from(computed),
                );
            }
        }
    }
}

/// Adds a step's gradients of scores to the sums of the unit's keys.
#[cube]
pub fn sum_queries(ds: &Array<Vector<f32, Four>>, sums: &mut Array<f32>, #[comptime] t: Tile) {
    #[unroll]
    for i in 0..comptime!(2 * t.warp_tiles) {
        #[unroll]
        for n in 0..comptime!(t.eights()) {
            let four = ds[comptime!(i / 2 * t.eights() + n)];
            sums[i] += four.extract(comptime!(i % 2 * 2)) + four.extract(comptime!(i % 2 * 2 + 1));
        }
    }
}

/// Adds the sums of the tile's keys to the gradient. Their positions are at address `rows`.
#[cube]
pub fn add_sums(
    sums: &Array<f32>,
    gradient: &GradientRows,
    rows: u32,
    lane: u32,
    #[comptime] t: Tile,
) {
    #[unroll]
    for i in 0..comptime!(2 * t.warp_tiles) {
        let sum = sums[i] + shuffle_xor(sums[i], 1u32);
        let sum = sum + shuffle_xor(sum, 2u32);
        let key = shared_load(rows + comptime!(i as u32 * ROW_PAIR * 4));
        add_number(
            gradient.address + u64::cast_from(key) * 4,
            sum,
            u32::cast_from(key != comptime!(NOWHERE) && lane & 3 == 0),
        );
    }
}
