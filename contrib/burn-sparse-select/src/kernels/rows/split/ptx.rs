//! Loads, parts and products by PTX.

use cubecl::prelude::*;

use crate::kernels::rows::split::{EIGHT, OWN, PAIR, PART_BYTES, PARTS, SplitTile, own_row};
use blocksparse_cubecl::arch::ptx::{
    Half, global_address, pack, read_four_words, shared_address, shared_load_words,
    shared_store_words, unpack,
};
use blocksparse_cubecl::arch::sm80::{Element, multiply, of_bits};
use blocksparse_cubecl::shared::addressing::Four;

/// A unit's numbers of its four rows, of a list that begins at row `start` of all, from its row `first` on; zeros behind its last row and a row's last number.
#[cube]
pub fn load_rows<T: CubePrimitive>(
    x: &[T],
    own: &mut Array<u32>,
    start: usize,
    first: usize,
    rows: usize,
    #[comptime] t: SplitTile,
) {
    let base = global_address::<T>(x);
    let quarter = UNIT_POS % 4;
    #[unroll]
    for i in 0..OWN {
        let row = first + own_row(i);
        let exists = row < rows;
        let line = start + select(exists, row, 0usize);
        let line = base + line as u64 * comptime!(2 * t.width as u64) + quarter as u64 * 16;
        let end = select(exists, comptime!(t.width as u32), 0u32);
        #[unroll]
        for pair in 0..comptime!(t.pairs()) {
            let number = comptime!((pair * PAIR) as u32) + quarter * comptime!(EIGHT as u32);
            let at = line + comptime!((2 * pair * PAIR) as u64);
            let words = read_four_words(at, number, end);
            #[unroll]
            for word in 0..4usize {
                own[comptime!((i * t.pairs() + pair) * 4 + word)] = words.extract(word);
            }
        }
    }
}

/// The sums of the squares of a unit's rows, in all units of a row.
#[cube]
pub fn row_squares(own: &Array<u32>, squares: &mut Array<f32>, #[comptime] t: SplitTile) {
    #[unroll]
    for i in 0..OWN {
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for word in 0..comptime!(4 * t.pairs()) {
            let pair = own[comptime!(i * 4 * t.pairs() + word)];
            let low = unpack(pair, false, Half::Bf16);
            let high = unpack(pair, true, Half::Bf16);
            sum += low * low + high * high;
        }
        sum += plane_shuffle_xor(sum, 1u32);
        sum += plane_shuffle_xor(sum, 2u32);
        squares[i] = sum;
    }
}

/// Eight numbers of a column whose numbers are side by side, from `at` on: zeros if `number` is not below `end`.
#[cube]
pub fn load_columns(
    columns: &[f32],
    numbers: &mut Array<f32>,
    at: usize,
    number: usize,
    end: usize,
) {
    let from = global_address::<f32>(columns) + at as u64 * 4;
    #[unroll]
    for half in 0..2usize {
        let words = read_four_words(
            from + comptime!(16 * half as u64),
            number as u32,
            end as u32,
        );
        #[unroll]
        for word in 0..4usize {
            numbers[comptime!(4 * half + word)] = of_bits(words.extract(word));
        }
    }
}

/// What is left of a number by a part: nothing of one that has no finite part, so that its products are what they are.
#[cube]
fn rest(number: f32, part: f32) -> f32 {
    select(number == part, 0.0f32, number - part)
}

/// Shares eight numbers of a column in three parts.
#[cube]
pub fn share_eight(numbers: &Array<f32>, shared: &Shared<[u32]>, offset: u32) {
    let target = shared_address(shared) + offset;
    let mut left = Array::<f32>::new(EIGHT);
    #[unroll]
    for i in 0..EIGHT {
        left[i] = numbers[i];
    }
    #[unroll]
    for part in 0..PARTS {
        let mut words = Vector::<u32, Four>::zeroed();
        #[unroll]
        for word in 0..4usize {
            let (low, high) = (left[comptime!(2 * word)], left[comptime!(2 * word + 1)]);
            let pair = pack(low, high, Half::Bf16);
            words.insert(word, pair);
            left[comptime!(2 * word)] = rest(low, unpack(pair, false, Half::Bf16));
            left[comptime!(2 * word + 1)] = rest(high, unpack(pair, true, Half::Bf16));
        }
        shared_store_words(target + comptime!((part * PART_BYTES) as u32), words);
    }
}

/// The products of a unit's rows with eight shared columns: `sums[2 i + j]` of its row `i` and its column `j` of two.
#[cube]
pub fn products(
    own: &Array<u32>,
    shared: &Shared<[u32]>,
    eight: usize,
    sums: &mut Array<f32>,
    #[comptime] t: SplitTile,
) {
    let pairs = comptime!(t.pairs());
    let lane = UNIT_POS % 32;
    let base = shared_address(shared)
        + eight as u32 * comptime!((t.pairs() * PARTS * PART_BYTES) as u32)
        + lane * 16;
    // Of both sixteens of rows those of the first part, then those of the others.
    let mut made = Array::<Vector<f32, Four>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        made[i] = Vector::<f32, Four>::zeroed();
    }
    #[unroll]
    for pair in 0..pairs {
        #[unroll]
        for part in 0..PARTS {
            let column =
                shared_load_words(base + comptime!(((pair * PARTS + part) * PART_BYTES) as u32));
            #[unroll]
            for step in 0..2usize {
                #[unroll]
                for sixteen in 0..2usize {
                    let upper = comptime!((2 * sixteen * t.pairs() + pair) * 4 + 2 * step);
                    let lower = comptime!(upper + 4 * t.pairs());
                    let mut row = Vector::<u32, Four>::zeroed();
                    row.insert(0usize, own[upper]);
                    row.insert(1usize, own[lower]);
                    row.insert(2usize, own[comptime!(upper + 1)]);
                    row.insert(3usize, own[comptime!(lower + 1)]);
                    let at = comptime!(2 * part.min(1) + sixteen);
                    made[at] = multiply(
                        row,
                        column.extract(comptime!(2 * step)),
                        column.extract(comptime!(2 * step + 1)),
                        made[at],
                        comptime!(Element::Half(Half::Bf16)),
                    );
                }
            }
        }
    }
    #[unroll]
    for sixteen in 0..2usize {
        let sum = made[sixteen] + made[comptime!(2 + sixteen)];
        #[unroll]
        for i in 0..4usize {
            sums[comptime!(4 * sixteen + i)] = sum.extract(i);
        }
    }
}
