//! Integers in the order of f32 values.

use cubecl::prelude::*;

/// Key of +∞.
pub const INFINITE: u32 = 0xff80_0000;

/// Returns an integer in the order of f32 values, given as bits. NaN is lowest, and −0 equals 0.
#[cube]
pub fn key(number: u32) -> u32 {
    let size = number & 0x7fff_ffffu32;
    let mut bits = number;
    if size > 0x7f80_0000u32 {
        bits = 0xff80_0000u32;
    }
    if size == 0u32 {
        bits = 0u32;
    }
    select(bits >> 31u32 == 1u32, !bits, bits | 0x8000_0000u32)
}

/// Returns the number of a `key`.
#[cube]
pub fn number(key: u32) -> f32 {
    f32::reinterpret(select(key >> 31u32 == 1u32, key & 0x7fff_ffffu32, !key))
}
