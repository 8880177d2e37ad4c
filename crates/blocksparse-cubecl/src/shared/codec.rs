//! 8-bit number formats in kernels, bit for bit as [`Quantization`] defines them.

use cubecl::prelude::*;

use blocksparse::Quantization;

/// Bits of ∞ without its sign. NaNs are larger.
pub const INFINITY: u32 = 0x7f80_0000;

/// Decodes the four elements of a word, without their scale.
#[cube]
pub fn decode_word<A: Float, N: Size>(
    word: u32,
    #[comptime] quantization: Quantization,
) -> Vector<A, N> {
    let mut numbers = Vector::<A, N>::zeroed();
    if comptime!(quantization == Quantization::Int8) {
        // Adds 128 and uses the result as the last mantissa bits of 2²³.
        let shifted = word ^ 0x8080_8080u32;
        #[unroll]
        for i in 0..4usize {
            let byte = (shifted >> comptime!(8 * i as u32)) & 0xffu32;
            let x = f32::reinterpret(byte | 0x4b00_0000u32) - 8_388_736.0f32;
            numbers.insert(i, A::cast_from(x));
        }
    } else {
        #[unroll]
        for i in 0..4usize {
            let code = word >> comptime!(8 * i as u32);
            numbers.insert(i, A::cast_from(decode_e4m3(code)));
        }
    }
    numbers
}

/// Decodes the lowest eight bits, which are not NaN. No intermediate float is subnormal, since devices may flush those to zero.
#[cube]
fn decode_e4m3(code: u32) -> f32 {
    let size = (code & 0x7fu32) << 20u32;
    let normal = f32::reinterpret(size + comptime!(120u32 << 23));
    // Equals 2⁻⁶ + m · 2⁻⁹.
    let subnormal = f32::reinterpret(size + comptime!(121u32 << 23)) - 0.015_625f32;
    let x = select(size < comptime!(1u32 << 23), subnormal, normal);
    f32::reinterpret(u32::reinterpret(x) | ((code & 0x80u32) << 24u32))
}

/// Encodes a number that was divided by its scale, in the lowest eight bits.
#[cube]
pub fn encode(x: f32, #[comptime] quantization: Quantization) -> u32 {
    let bits = u32::reinterpret(x);
    let size_bits = bits & 0x7fff_ffffu32;
    let is_nan = size_bits > INFINITY;
    let largest = comptime!(quantization.largest());
    // As integers they have the same order, and NaN needs no special case.
    let size = f32::reinterpret(min(size_bits, comptime!(largest.to_bits())));
    let sign = bits >> 31u32;
    if comptime!(quantization == Quantization::Int8) {
        // Above 2²³ the last mantissa bits are an integer, rounded to even.
        let n = u32::reinterpret(size + 8_388_608.0f32) & 0xffu32;
        select(
            is_nan,
            0u32,
            select(sign == 1u32, (256u32 - n) & 0xffu32, n),
        )
    } else {
        let bits = u32::reinterpret(size);
        let normal =
            ((bits + 0x7_ffffu32 + ((bits >> 20u32) & 1u32)) >> 20u32) - comptime!(120u32 << 3);
        let subnormal = u32::reinterpret(size * 512.0f32 + 8_388_608.0f32) & 0xffu32;
        let least = comptime!(0.015_625f32.to_bits());
        let nearest = select(bits < least, subnormal, normal);
        select(is_nan, 0u32, nearest | (sign << 7u32))
    }
}

/// Returns the decoded value of the code that `encode` gives in E4M3. `x` was divided by its scale and is at most 448.
#[cube]
pub fn nearest_e4m3(x: f32) -> f32 {
    let bits = u32::reinterpret(x);
    let size = bits & 0x7fff_ffffu32;
    // Rounds to four significant bits, or to multiples of 2⁻⁹, counted in the last mantissa bits: compilers may simplify x + c − c to x.
    let normal = (size + 0x7_ffffu32 + ((size >> 20u32) & 1u32)) & 0xfff0_0000u32;
    let count = u32::reinterpret(f32::reinterpret(size) * 512.0f32 + 8_388_608.0f32) & 0xffu32;
    let subnormal = u32::reinterpret(f32::cast_from(count) * 0.001_953_125f32);
    let least = comptime!(0.015_625f32.to_bits());
    let nearest = select(size < least, subnormal, normal);
    f32::reinterpret(nearest | (bits & 0x8000_0000u32))
}
