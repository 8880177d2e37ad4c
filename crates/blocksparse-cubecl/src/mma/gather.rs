//! Rows in memory: their positions, copies into shared memory, and a unit's pairs of elements.

use cubecl::prelude::*;

use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::Listing;
use crate::shared::own_rows::own_place;

/// Strides of a `[batch, heads, seq, dim]` tensor in pieces of 16 bytes, and its sequence length.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Strides {
    /// Stride of batch entries.
    pub batch: u64,
    /// Stride of heads.
    pub head: u64,
    /// Stride of positions.
    pub row: u64,
    /// Number of positions.
    pub len: u32,
}

/// Returns the address of a head's first row.
#[cube]
pub fn head_address(buffer: u64, strides: &Strides, batch: u32, head: u32) -> u64 {
    let pieces = u64::cast_from(batch) * strides.batch + u64::cast_from(head) * strides.head;
    buffer + pieces * 16
}

/// Returns the position at a place, or [`NOWHERE`].
#[cube]
pub fn position_at(place: u32, listing: &Listing, len: u32, #[comptime] t: Tile) -> u32 {
    let mut position = place;
    let mut exists = true;
    if comptime!(t.residue) {
        let class = place / listing.class_len as u32;
        position = place % listing.class_len as u32 * listing.stride as u32 + class;
        exists = class < listing.stride as u32;
    }
    select(exists && position < len, position, comptime!(NOWHERE))
}

/// Returns the offset of the slot of step `j`.
#[cube]
pub fn slot_of(j: u32, #[comptime] t: Tile) -> u32 {
    let slot = if comptime!(t.slots() == 2) {
        j & 1
    } else {
        j % comptime!(t.slots() as u32)
    };
    slot * comptime!(t.slot_bytes() as u32)
}

/// Writes the positions of the tile's own rows to shared memory.
#[cube]
pub fn own_positions(
    base: u32,
    plan: &[u32],
    rows: u32,
    listing: &Listing,
    len: u32,
    #[comptime] t: Tile,
) {
    let mut row = UNIT_POS_X;
    while row < comptime!(t.rows() as u32) {
        let place = own_place(plan, rows, row, comptime!(t.own_shape()));
        shared_store(base + row * 4, position_at(place, listing, len, t));
        row += comptime!(t.units() as u32);
    }
}

/// Starts to copy `rows` rows to shared memory, where their positions are already. `stride` is in pieces of 16 bytes.
#[cube]
pub fn copy_rows(
    head: u64,
    stride: u64,
    positions: u32,
    target: u32,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let units = comptime!(t.units());
    let pieces = comptime!(t.words(dim) / 4);
    let total = comptime!(rows * pieces);
    if comptime!(units % pieces == 0 && total % units == 0) {
        let row = UNIT_POS_X / comptime!(pieces as u32);
        let piece = UNIT_POS_X % comptime!(pieces as u32) * 16;
        let source = head + u64::cast_from(piece);
        let first = target + row * comptime!(t.pitch(dim) as u32) + piece;
        let position = positions + row * 4;
        #[unroll]
        for i in 0..comptime!(total / units) {
            let below = comptime!((i * units / pieces) as u32);
            copy_of_row(
                first + comptime!(below * t.pitch(dim) as u32),
                source,
                shared_load(position + comptime!(below * 4)),
                stride,
                t.far_rows,
            );
        }
    } else {
        let mut index = UNIT_POS_X;
        while index < comptime!(total as u32) {
            let row = index / comptime!(pieces as u32);
            let piece = index % comptime!(pieces as u32) * 16;
            let target = target + row * comptime!(t.pitch(dim) as u32) + piece;
            let base = head + u64::cast_from(piece);
            let position = shared_load(positions + row * 4);
            copy_of_row(target, base, position, stride, t.far_rows);
            index += comptime!(units as u32);
        }
    }
}

/// Zeros the 16 bytes of padding between the width `dim` and the depth of a product, in `rows` rows from `target` on. Copies leave them unchanged.
#[cube]
pub fn clear_beyond(
    target: u32,
    #[comptime] rows: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    if comptime!(t.ragged(dim)) {
        let mut row = UNIT_POS_X;
        while row < comptime!(rows as u32) {
            let at = target
                + row * comptime!(t.pitch(dim) as u32)
                + comptime!((dim * t.element.bytes()) as u32);
            #[unroll]
            for word in 0..4u32 {
                shared_store(at + comptime!(word * 4), 0u32);
            }
            row += comptime!(t.units() as u32);
        }
    }
}

/// Two neighbouring elements in memory.
#[derive(CubeType, Clone, Copy)]
pub struct NumberPair {
    /// First number.
    pub low: f32,
    /// Second number.
    pub high: f32,
}

/// Reads the unit's pair in the `n`-th group of eight columns of the row at word `row`.
#[cube]
pub fn load_pair(
    words: &[u32],
    row: usize,
    quad: u32,
    #[comptime] n: usize,
    #[comptime] t: Tile,
) -> NumberPair {
    let mut pair = NumberPair {
        low: f32::new(0.0),
        high: f32::new(0.0),
    };
    if comptime!(t.element == Element::Tf32) {
        let at = row + quad as usize + comptime!(8 * n);
        pair.low = of_bits(words[at]);
        pair.high = of_bits(words[at + 1]);
    } else {
        let word = words[row + (quad / 2) as usize + comptime!(4 * n)];
        pair.low = unpack(word, false, comptime!(t.element.half()));
        pair.high = unpack(word, true, comptime!(t.element.half()));
    }
    pair
}

/// Writes the pair that `load_pair` reads.
#[cube]
pub fn store_pair(
    words: &mut [u32],
    row: usize,
    quad: u32,
    pair: &NumberPair,
    #[comptime] n: usize,
    #[comptime] t: Tile,
) {
    if comptime!(t.element == Element::Tf32) {
        let at = row + quad as usize + comptime!(8 * n);
        words[at] = bits_of(pair.low);
        words[at + 1] = bits_of(pair.high);
    } else {
        let half = comptime!(t.element.half());
        words[row + (quad / 2) as usize + comptime!(4 * n)] = pack(pair.low, pair.high, half);
    }
}
