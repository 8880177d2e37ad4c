//! Numbers of eight bits as pairs in half precision, which can say all of them.

use cubecl::prelude::*;

use blocksparse::Quantization;
use blocksparse_cubecl::arch::ptx::{Half, multiply_add_pair};

/// The first and the third number of a word, or the second and the fourth, without their scale.
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
        // 128 and 1024, −1.
        let base = comptime!(both(half, [0x4300, 0x6400]));
        let minus = comptime!(both(half, [0xbf80, 0xbc00])).runtime();
        multiply_add_pair(sign | base, minus, size | base, half)
    } else {
        let shift = comptime!(match half {
            Half::Bf16 => 4u32,
            Half::F16 => 7u32,
        });
        // 2¹²⁰ and 2⁸, −0.
        let power = comptime!(both(half, [0x7b80, 0x5c00])).runtime();
        let zero = 0x8000_8000u32.runtime();
        multiply_add_pair((size << shift) | (sign << 8u32), power, zero, half)
    }
}

/// Twice the bits of a number, of bf16 or of f16.
fn both(half: Half, [bf16, f16]: [u32; 2]) -> u32 {
    match half {
        Half::Bf16 => bf16 << 16 | bf16,
        Half::F16 => f16 << 16 | f16,
    }
}
