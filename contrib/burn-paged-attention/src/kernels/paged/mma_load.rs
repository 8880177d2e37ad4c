//! What the lanes of a warp load, and what of it is a factor of a product.

use cubecl::prelude::*;

use crate::kernels::paged::mma_codec::decode_pair;
use crate::kernels::paged::mma_tile::MmaTile;
use crate::kernels::paged::page_list::{CubePages, Scales, stored_page};
use blocksparse_cubecl::arch::ptx::merge_words;
use blocksparse_cubecl::shared::addressing::Four;

/// Where a lane is: `4 across + along` in its warp.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Lane {
    pub warp: usize,
    pub across: usize,
    pub along: usize,
}

/// The slot of a step's page that stands for one: slots that do not count are the next that does, because their numbers must be finite.
#[cube]
fn stand_in(page: &Array<u32>, slot: usize) -> usize {
    min(max(slot as u32, page[1]), page[2] - 1u32) as usize
}

/// The words of a query as numbers of a quantised word come: the first and third of four, the second and fourth.
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

/// The left factor of product `part` of a load of two keys.
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

/// The left factor of product `part` of load `i` of values.
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
        // Two keys that follow each other.
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

/// The scales of keys `across` and `across + 8`, and of their values.
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

/// Words of keys `across` and `across + 8`: every fourth 16 bytes from `along` on.
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

/// Words of the values of keys `2 along`, `2 along + 1` and those 8 further: every eighth 16 bytes from `across` on.
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
