//! Parts of a step of the kernel, except for the selection.

use cubecl::prelude::*;

use crate::kernels::selection::compressed::asm::{register_product, wait_product};
use crate::kernels::selection::compressed::tile::{AttentionSumTile, ROWS, STEP};
use blocksparse_cubecl::arch::ptx::{
    exp2, multiply_add, shared_load, shared_store, shuffle_xor, uniform,
};
use blocksparse_cubecl::arch::sm80::{
    Element, bits_of, copy_piece, load_matrices, multiply, of_bits,
};
use blocksparse_cubecl::arch::tma::{ROW, descriptor};
use blocksparse_cubecl::shared::addressing::Four;

/// Marks a missing key.
const NOWHERE: u32 = u32::MAX;

/// Starts to copy the keys of a step from entry `first` on, with zeros after the last entry.
#[cube]
pub fn copy_keys(
    keys: u64,
    target: u32,
    first: u32,
    entries: u32,
    #[comptime] tile: AttentionSumTile,
) {
    let pieces = comptime!((tile.width / 8) as u32);
    #[unroll]
    for i in 0..comptime!(STEP * tile.width / 8 / tile.units()) {
        let at = UNIT_POS_X + comptime!((i * tile.units()) as u32);
        let (row, piece) = (at / pieces, at % pieces);
        let entry = first + row;
        let place = select(entry < entries, entry, comptime!(NOWHERE));
        let mut at = row * comptime!(tile.pitch() as u32) + piece * 16;
        if comptime!(tile.is_wgmma) {
            // Spans of 64 elements, whose eight pieces are swizzled.
            at = piece / 8 * comptime!(tile.span() as u32)
                + row * comptime!(ROW as u32)
                + ((piece % 8) ^ (row % 8)) * 16;
        }
        copy_piece(
            target + at,
            keys + u64::cast_from(piece * 16),
            place,
            comptime!((tile.width * 2) as u32).runtime(),
        );
    }
}

/// Multiplies the warp's rows with the keys of a step, on wgmma: four warps have 64 rows.
#[cube]
pub fn group_products<P: Size, R: Size, S: Size>(
    low: Vector<u32, P>,
    high: Vector<u32, R>,
    keys: u32,
    #[comptime] tile: AttentionSumTile,
) -> Array<Vector<f32, Four>> {
    let half = comptime!(tile.half());
    let (depth, span) = comptime!((tile.depth(), tile.span()));
    let started =
        register_product::<P, R, S>(low, high, descriptor(keys, 16usize), half, depth, span);
    let sums = wait_product::<S>(started);
    let mut s = Array::<Vector<f32, Four>>::new(comptime!(tile.eights()));
    #[unroll]
    for n in 0..comptime!(tile.eights()) {
        let mut four = Vector::<f32, Four>::zeroed();
        #[unroll]
        for i in 0..4usize {
            four.insert(i, sums.extract(comptime!(4 * n + i)));
        }
        s[n] = four;
    }
    s
}

/// Multiplies the warp's rows with the keys of a chunk, on mma.sync.
#[cube]
pub fn products(
    left: &Array<Vector<u32, Four>>,
    keys: u32,
    #[comptime] tile: AttentionSumTile,
) -> Array<Vector<f32, Four>> {
    let tiles = comptime!(tile.tiles);
    let depth = comptime!(tile.depth());
    let mut s = Array::<Vector<f32, Four>>::new(comptime!(tiles * tile.eights()));
    #[unroll]
    for i in 0..comptime!(tiles * tile.eights()) {
        s[i] = Vector::<f32, Four>::zeroed();
    }
    #[unroll]
    for n in 0..depth {
        #[unroll]
        for pair in 0..comptime!(tile.eights() / 2) {
            let right = load_matrices(keys, comptime!(pair * 16 * tile.pitch() + n * 32));
            #[unroll]
            for m in 0..tiles {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(m * tile.eights() + 2 * pair + half);
                    s[at] = multiply(
                        left[comptime!(m * depth + n)],
                        right.extract(comptime!(2 * half)),
                        right.extract(comptime!(2 * half + 1)),
                        s[at],
                        comptime!(Element::Half(tile.half())),
                    );
                }
            }
        }
    }
    s
}

/// Converts products to weights.
#[cube]
pub fn weigh(
    p: &mut Array<Vector<f32, Four>>,
    shift: &Array<f32>,
    seen: &Array<u32>,
    factor: f32,
    chunk: u32,
    along: u32,
    #[comptime] tile: AttentionSumTile,
) {
    #[unroll]
    for m in 0..comptime!(tile.tiles) {
        #[unroll]
        for n in 0..comptime!(tile.eights()) {
            let mut four = p[comptime!(m * tile.eights() + n)];
            #[unroll]
            for i in 0..4usize {
                let power = multiply_add(four.extract(i), factor, shift[comptime!(2 * m + i / 2)]);
                four.insert(i, exp2(power));
            }
            p[comptime!(m * tile.eights() + n)] = four;
        }
    }
    // Rows of later queries see at least as much, so checking the first one suffices.
    if (chunk + 1) * comptime!(tile.chunk() as u32) > uniform(seen[0]) {
        #[unroll]
        for m in 0..comptime!(tile.tiles) {
            #[unroll]
            for n in 0..comptime!(tile.eights()) {
                let mut four = p[comptime!(m * tile.eights() + n)];
                #[unroll]
                for i in 0..4usize {
                    let entry = chunk * comptime!(tile.chunk() as u32)
                        + comptime!((n * 8 + i % 2) as u32)
                        + 2 * along;
                    let is_seen = entry < seen[comptime!(2 * m + i / 2)];
                    four.insert(i, select(is_seen, four.extract(i), 0.0f32));
                }
                p[comptime!(m * tile.eights() + n)] = four;
            }
        }
    }
}

/// Sums over the heads of each query, into shared memory.
///
/// A query has `members` adjacent rows. The lanes of a query's rows reduce and scatter: in each step they exchange halves of their columns until each has its
/// own sums.
#[cube]
pub fn sum_heads(
    p: &Array<Vector<f32, Four>>,
    sums: u32,
    across: u32,
    along: u32,
    lane: u32,
    #[comptime] tile: AttentionSumTile,
) {
    // If rows `across` and `across + 8` belong to one query, they are added first.
    let halves = comptime!(if tile.members == ROWS { 1usize } else { 2usize });
    let lanes = comptime!(tile.members.min(8));
    let kept = comptime!(2 * tile.eights() / lanes);
    #[unroll]
    for m in 0..comptime!(tile.tiles) {
        #[unroll]
        for half in 0..halves {
            let mut own = Array::<f32>::new(comptime!(2 * tile.eights()));
            #[unroll]
            for n in 0..comptime!(tile.eights()) {
                let four = p[comptime!(m * tile.eights() + n)];
                #[unroll]
                for c in 0..2usize {
                    let mut sum = four.extract(comptime!(2 * half + c));
                    if comptime!(halves == 1) {
                        sum += four.extract(comptime!(2 + c));
                    }
                    own[comptime!(2 * n + c)] = sum;
                }
            }
            #[unroll]
            for step in 0..comptime!(lanes.ilog2() as usize) {
                // Number of sums that a lane keeps, and the bit of the lane that selects which.
                let few = comptime!(tile.eights() >> step);
                let bit = comptime!((2 * lanes as u32) >> step);
                let is_upper = lane & bit != 0;
                #[unroll]
                for i in 0..few {
                    let low = own[i];
                    let high = own[comptime!(few + i)];
                    let given = select(is_upper, low, high);
                    own[i] = select(is_upper, high, low) + shuffle_xor(given, bit);
                }
            }
            let query =
                (across + comptime!((m * ROWS + half * 8) as u32)) / comptime!(tile.members as u32);
            let start = sums + query * comptime!(tile.sums_pitch() as u32) + along * 8;
            #[unroll]
            for i in 0..kept {
                // Columns `2 along` and `2 along + 1` of a group of eight.
                let at =
                    across % comptime!(lanes as u32) * comptime!(kept as u32) + comptime!(i as u32);
                shared_store(start + at / 2 * 32 + at % 2 * 4, bits_of(own[i]));
            }
        }
    }
}

/// Returns the sum of a block that starts at compressed block `place` of the ring of two steps. A compressed block distributes its weight evenly over its
/// strides.
#[cube]
pub fn overlapping(sums: u32, place: u32, #[comptime] tile: AttentionSumTile) -> f32 {
    let (strides, before) = comptime!((tile.strides, tile.covered - 1));
    let mut attention_sum = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(strides + before) {
        // Number of strides that the compressed block has in the block.
        let weight =
            comptime!((before.min(strides + before - 1 - i) + 1 - before.saturating_sub(i)) as f32);
        let at =
            (place + comptime!((2 * STEP + i - before) as u32)) & comptime!(2 * STEP as u32 - 1);
        attention_sum = multiply_add(
            of_bits(shared_load(sums + at * 4)),
            weight.runtime(),
            attention_sum,
        );
    }
    attention_sum
}
