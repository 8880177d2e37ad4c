//! Kernel that quantizes rows and writes them into pages.

// Integers in kernels lack `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use crate::kernels::paged::append::{AppendShape, Rows, row_slot};
use blocksparse::Quantization;
use blocksparse::internal::SMALLEST;
use blocksparse_cubecl::limits::{check_types, most_units};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::codec::{INFINITY, encode};

/// Units of a cube.
const UNITS: usize = 256;
/// Most units of a row.
const MOST_LANES: usize = 32;

/// Split of rows among units: adjacent units share a row, each with every `lanes`-th word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lanes {
    quantization: Quantization,
    /// Words of a key and of a value.
    words: [usize; 2],
    /// Units of a row, a power of two.
    lanes: usize,
    /// Units of a cube.
    units: usize,
}

/// Processes the rows of keys, then those of values: finds the maximum and scale of a row, and rounds its elements.
#[cube(launch_unchecked, address_type = "dynamic")]
fn append<E: Float>(
    k: &[E],
    v: &[E],
    slots: &[i32],
    keys: &mut [u32],
    values: &mut [u32],
    key_scales: &mut [f32],
    value_scales: &mut [f32],
    sizes: Rows,
    #[comptime] t: Lanes,
    #[define(E)] _element: ElemType,
) {
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(t.lanes);
    let rows = comptime!(t.units / t.lanes);
    let both = CUBE_POS * rows + unit / comptime!(t.lanes);
    let is_key = both < sizes.count;
    let row = select(is_key, both, both - min(both, sizes.count));
    let is_row = row < sizes.count;
    let words = select(
        is_key,
        comptime!(t.words[0]).runtime(),
        comptime!(t.words[1]).runtime(),
    );
    let mut largest = 0u32;
    let mut has_nan = 0u32;
    if is_row {
        let mut word = lane;
        while word < words {
            #[unroll]
            for i in 0..4usize {
                let x = read::<E>(k, v, is_key, (row * words + word) * 4 + i);
                let bits = u32::reinterpret(x) & 0x7fff_ffffu32;
                largest = max(largest, select(bits < INFINITY, bits, 0u32));
                has_nan |= select(bits > INFINITY, 1u32, 0u32);
            }
            word += comptime!(t.lanes);
        }
    }
    let mut shared = Shared::<[u32]>::new_slice(comptime!(2 * t.units));
    shared[unit] = largest;
    shared[comptime!(t.units) + unit] = has_nan;
    sync_cube();
    let first = unit - lane;
    for other in 0..comptime!(t.lanes) {
        largest = max(largest, shared[first + other]);
        has_nan |= shared[comptime!(t.units) + first + other];
    }
    if is_row {
        let to = row_slot(slots, row, &sizes);
        if to < sizes.pages * sizes.page {
            let is_small = largest < comptime!(SMALLEST.to_bits());
            let amax = f32::reinterpret(largest);
            let scale = amax / comptime!(t.quantization.largest());
            let scale = min(scale, comptime!(t.quantization.largest_scale()));
            let mut scale = select(is_small, 1.0f32, scale);
            let nan = f32::reinterpret(0x7fc0_0000u32.runtime());
            scale = select(has_nan == 1u32, nan, scale);
            let mut word = lane;
            while word < words {
                let mut packed = 0u32;
                #[unroll]
                for i in 0..4usize {
                    let x = read::<E>(k, v, is_key, (row * words + word) * 4 + i);
                    let code = encode(x / scale, comptime!(t.quantization));
                    packed |= code << comptime!(8 * i as u32);
                }
                if is_key {
                    keys[to * comptime!(t.words[0]) + word] = packed;
                } else {
                    values[to * comptime!(t.words[1]) + word] = packed;
                }
                word += comptime!(t.lanes);
            }
            if lane == 0 {
                if is_key {
                    key_scales[to] = scale;
                } else {
                    value_scales[to] = scale;
                }
            }
        }
    }
}

#[cube]
fn read<E: Float>(k: &[E], v: &[E], is_key: bool, at: usize) -> f32 {
    if is_key {
        f32::cast_from(k[at])
    } else {
        f32::cast_from(v[at])
    }
}

/// Quantizing [`append_rows`](crate::kernels::paged::append_rows). Writes keys, values, scales of keys and scales of values; keys and values are
/// words of four elements. The shape's dtype is that of the new rows; widths are multiples of 4.
pub fn append_quantized(
    client: &Client,
    shape: &AppendShape,
    quantization: Quantization,
    [k, v]: [&Handle; 2],
    slots: &Handle,
    [keys, values, key_scales, value_scales]: [&Handle; 4],
) -> Result<(), KernelError> {
    let properties = client.properties();
    check_types(properties, [shape.dtype, ElemType::Float(FloatKind::F32)])?;
    let words = shape.widths.map(|width| width / 4);
    let units = 1 << UNITS.min(most_units(properties)).ilog2();
    let lanes = words[0].max(words[1]).max(1).next_power_of_two();
    let lanes = Lanes {
        quantization,
        words,
        lanes: lanes.min(MOST_LANES).min(units),
        units,
    };
    let count = shape.count();
    let widest = shape.widths[0].max(shape.widths[1]);
    let largest = (shape.pages * shape.page * widest).max(2 * count * widest + units);
    let address = address_of(client, largest)?;
    let cubes = (2 * count).div_ceil(units / lanes.lanes);
    let cubes = spread(client, cubes as u64)?;
    if count == 0 || shape.pages == 0 {
        return Ok(());
    }
    let all = shape.pages * shape.page;
    // SAFETY: a unit reads elements of a row below `count` and that row's slot, and writes words of a slot of a page below `pages`, and its scale;
    // the buffers have the stated lengths (see `buffer`).
    unsafe {
        append::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(lanes.units as u32),
            address,
            buffer(k, count * 4 * words[0]),
            buffer(v, count * 4 * words[1]),
            buffer(slots, shape.batch * shape.tables * shape.rows),
            buffer(keys, all * words[0]),
            buffer(values, all * words[1]),
            buffer(key_scales, all),
            buffer(value_scales, all),
            shape.sizes(),
            lanes,
            shape.dtype,
        );
    }
    Ok(())
}
