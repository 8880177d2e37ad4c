//! Loads of a warp's lanes, and their conversion to operands.

use blocksparse::Quantization;
use cubecl::prelude::*;

use crate::kernels::paged::mma_tile::MmaTile;
use crate::kernels::paged::page_list::{CubePages, Scales, stored_page};
use blocksparse_cubecl::arch::ptx::{Half, merge_words, multiply_add_pair};
use blocksparse_cubecl::shared::addressing::Four;

/// Coordinates of a lane: `4 across + along` in its warp.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Lane {
    pub warp: usize,
    pub across: usize,
    pub along: usize,
}

/// Clamps a slot to the used ones of a step's page, because the contents of others might not be finite.
#[cube]
fn stand_in(page: &Array<u32>, slot: usize) -> usize {
    min(max(slot as u32, page[1]), page[2] - 1u32) as usize
}

/// Permutes a query to the order of quantized elements: the first and third of four, then the second and fourth.
#[cube]
pub(crate) fn paired(x: Vector<u32, Four>) -> Vector<u32, Four> {
    let mut pairs = Vector::<u32, Four>::zeroed();
    #[unroll]
    for i in 0..2usize {
        let low = x.extract(comptime!(2 * i));
        let high = x.extract(comptime!(2 * i + 1));
        pairs.insert(comptime!(2 * i), merge_words(low, high, false));
        pairs.insert(comptime!(2 * i + 1), merge_words(low, high, true));
    }
    pairs
}

/// Returns the left operand of product `part` for a load of two keys.
#[cube]
pub(crate) fn key_factor(
    low: Vector<u32, Four>,
    high: Vector<u32, Four>,
    #[comptime] part: usize,
    #[comptime] t: MmaTile,
) -> Vector<u32, Four> {
    let mut a = Vector::<u32, Four>::zeroed();
    #[unroll]
    for half in 0..2usize {
        if comptime!(t.quantization.is_some()) {
            let quantization = comptime!(t.quantization.unwrap());
            let odd = comptime!(half == 1);
            a.insert(
                comptime!(2 * half),
                decode_pair(low.extract(part), odd, quantization, t.half),
            );
            a.insert(
                comptime!(2 * half + 1),
                decode_pair(high.extract(part), odd, quantization, t.half),
            );
        } else {
            let word = comptime!(2 * part + half);
            a.insert(comptime!(2 * half), low.extract(word));
            a.insert(comptime!(2 * half + 1), high.extract(word));
        }
    }
    a
}

/// Returns the left operand of product `part` for load `i` of values.
#[cube]
pub(crate) fn value_factor<V: Size>(
    v: &Array<Vector<u32, V>>,
    #[comptime] i: usize,
    #[comptime] part: usize,
    #[comptime] t: MmaTile,
) -> Vector<u32, Four> {
    let loads = comptime!(t.value_loads());
    let quantised = comptime!(t.quantization.is_some());
    let word = comptime!(if quantised { part / 2 } else { part });
    let mut a = Vector::<u32, Four>::zeroed();
    #[unroll]
    for half in 0..2usize {
        // Two adjacent keys.
        let x = v[comptime!(2 * half * loads + i)].extract(word);
        let y = v[comptime!((2 * half + 1) * loads + i)].extract(word);
        if quantised {
            let quantization = comptime!(t.quantization.unwrap());
            let bytes = merge_words(x, y, comptime!(part % 2 == 1));
            a.insert(
                comptime!(2 * half),
                decode_pair(bytes, false, quantization, t.half),
            );
            a.insert(
                comptime!(2 * half + 1),
                decode_pair(bytes, true, quantization, t.half),
            );
        } else {
            a.insert(comptime!(2 * half), merge_words(x, y, false));
            a.insert(comptime!(2 * half + 1), merge_words(x, y, true));
        }
    }
    a
}

/// Loads the scales of keys `across` and `across + 8`, and of their values.
#[cube]
pub(crate) fn load_scales(
    of: &ComptimeOption<Scales>,
    scales: &mut Array<f32>,
    page: &Array<u32>,
    pages: &CubePages,
    at: usize,
    lane: &Lane,
    #[comptime] t: MmaTile,
) {
    let of = of.as_ref().unwrap();
    if comptime!(t.apart()) {
        #[unroll]
        for key in 0..2usize {
            if page[key] > 0u32 {
                let slot = (page[key] - 1u32) as usize;
                scales[key] = of.keys[slot];
                scales[comptime!(2 + key)] = of.values[slot];
            }
        }
    } else if page[0] > 0u32 {
        let first = stored_page(pages, page[0]);
        let first = first * comptime!(t.page);
        #[unroll]
        for key in 0..2usize {
            let slot = at % comptime!(t.page) + comptime!(8 * key) + lane.across;
            let slot = stand_in(page, slot);
            scales[key] = of.keys[first + slot];
            scales[comptime!(2 + key)] = of.values[first + slot];
        }
    }
}

/// Loads words of keys `across` and `across + 8`: every fourth 16 bytes from `along` on.
#[cube]
pub(crate) fn load_keys(
    keys: &[Vector<u32, Four>],
    k: &mut Array<Vector<u32, Four>>,
    page: &Array<u32>,
    pages: &CubePages,
    at: usize,
    lane: &Lane,
    #[comptime] t: MmaTile,
) {
    if comptime!(t.apart()) {
        #[unroll]
        for key in 0..2usize {
            if page[key] > 0u32 {
                let row = (page[key] - 1u32) as usize * comptime!(4 * t.key_loads()) + lane.along;
                #[unroll]
                for i in 0..comptime!(t.key_loads()) {
                    k[comptime!(key * t.key_loads() + i)] = keys[row + comptime!(4 * i)];
                }
            }
        }
    } else if page[0] > 0u32 {
        let first = stored_page(pages, page[0]);
        let loads = comptime!(4 * t.key_loads());
        let first = first * comptime!(t.page * loads);
        #[unroll]
        for key in 0..2usize {
            let slot = at % comptime!(t.page) + comptime!(8 * key) + lane.across;
            let row = first + stand_in(page, slot) * loads + lane.along;
            #[unroll]
            for i in 0..comptime!(t.key_loads()) {
                k[comptime!(key * t.key_loads() + i)] = keys[row + comptime!(4 * i)];
            }
        }
    }
}

/// Loads words of the values of keys `2 along`, `2 along + 1` and those 8 further: every eighth 16 bytes from `across` on.
#[cube]
pub(crate) fn load_values<V: Size>(
    values: &[Vector<u32, V>],
    v: &mut Array<Vector<u32, V>>,
    page: &Array<u32>,
    pages: &CubePages,
    at: usize,
    lane: &Lane,
    #[comptime] t: MmaTile,
) {
    if comptime!(t.apart()) {
        #[unroll]
        for key in 0..4usize {
            if page[comptime!(2 + key)] > 0u32 {
                let slot = (page[comptime!(2 + key)] - 1u32) as usize;
                let row = slot * comptime!(8 * t.value_loads()) + lane.across;
                #[unroll]
                for i in 0..comptime!(t.value_loads()) {
                    v[comptime!(key * t.value_loads() + i)] = values[row + comptime!(8 * i)];
                }
            }
        }
    } else if page[0] > 0u32 {
        let first = stored_page(pages, page[0]);
        let loads = comptime!(8 * t.value_loads());
        let first = first * comptime!(t.page * loads);
        #[unroll]
        for key in 0..4usize {
            let slot = at % comptime!(t.page) + comptime!(key / 2 * 8 + key % 2) + 2 * lane.along;
            let row = first + stand_in(page, slot) * loads + lane.across;
            #[unroll]
            for i in 0..comptime!(t.value_loads()) {
                v[comptime!(key * t.value_loads() + i)] = values[row + comptime!(8 * i)];
            }
        }
    }
}

/// Converts the first and third element of a word, or the second and fourth, unscaled.
///
/// ```text
/// int8    (2ⁿ + low seven bits) − (2ⁿ + 128 · sign)      2ⁿ: bits of the numbers are its last ones
/// e4m3    bits where half precision has them, times the quotient of both exponents' biases
/// ```
#[cube]
pub fn decode_pair(
    word: u32,
    #[comptime] odd: bool,
    #[comptime] quantization: Quantization,
    #[comptime] half: Half,
) -> u32 {
    let mut x = word;
    if comptime!(odd) {
        x = word >> 8u32;
    }
    let size = x & 0x007f_007fu32;
    let sign = x & 0x0080_0080u32;
    if comptime!(quantization == Quantization::Int8) {
        // 128 or 1024, and −1.
        let base = comptime!(both(half, [0x4300, 0x6400]));
        let minus = comptime!(both(half, [0xbf80, 0xbc00])).runtime();
        multiply_add_pair(sign | base, minus, size | base, half)
    } else {
        let shift = comptime!(match half {
            Half::Bf16 => 4u32,
            Half::F16 => 7u32,
        });
        // 2¹²⁰ or 2⁸, and −0.
        let power = comptime!(both(half, [0x7b80, 0x5c00])).runtime();
        let zero = 0x8000_8000u32.runtime();
        multiply_add_pair((size << shift) | (sign << 8u32), power, zero, half)
    }
}

/// Returns two copies of the bits of a bf16 or f16 number.
fn both(half: Half, [bf16, f16]: [u32; 2]) -> u32 {
    match half {
        Half::Bf16 => bf16 << 16 | bf16,
        Half::F16 => f16 << 16 | f16,
    }
}
