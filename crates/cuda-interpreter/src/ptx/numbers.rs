//! Floating-point numbers as registers hold them.

use blocksparse::Quantization;
use half::{bf16, f16};

pub fn f32_of(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

pub fn of_f32(value: f32) -> u64 {
    value.to_bits().into()
}

pub fn f64_of(bits: u64) -> f64 {
    f64::from_bits(bits)
}

pub fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

pub fn f32_to_f16(value: f32) -> u16 {
    f16::from_f32(value).to_bits()
}

pub fn e4m3_to_f32(bits: u8) -> f32 {
    Quantization::Fp8E4m3.decode(bits)
}

/// Of numbers beyond ±448 the nearest of these.
pub fn f32_to_e4m3(value: f32) -> u8 {
    match value.is_nan() {
        true => 0x7f,
        false => Quantization::Fp8E4m3.encode(value),
    }
}

pub fn f32_to_bf16(value: f32) -> u16 {
    bf16::from_f32(value).to_bits()
}

/// Which representable number takes a result's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

impl Rounding {
    pub fn named(text: &str) -> Option<Self> {
        Some(match text {
            "rn" | "rni" => Self::Nearest,
            "rz" | "rzi" => Self::Zero,
            "rm" | "rmi" => Self::Down,
            "rp" | "rpi" => Self::Up,
            _ => return None,
        })
    }
}

/// The sum of a product and a number, rounded once. Products of two f32 are exact in f64.
pub fn fused(a: f32, b: f32, c: f32) -> f32 {
    (f64::from(a) * f64::from(b) + f64::from(c)) as f32
}

/// `exact` as an f32.
pub fn rounded(exact: f64, rounding: Rounding) -> f32 {
    let nearest = exact as f32;
    let off = f64::from(nearest) - exact;
    match rounding {
        Rounding::Down if off > 0.0 => nearest.next_down(),
        Rounding::Up if off < 0.0 => nearest.next_up(),
        Rounding::Zero if off > 0.0 && exact > 0.0 => nearest.next_down(),
        Rounding::Zero if off < 0.0 && exact < 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

/// `value` without a fraction.
pub fn whole(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// `value` between 0 and 1. NaN becomes 0.
pub fn saturated(value: f32) -> f32 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// Of two numbers the lesser, or the one that is one.
pub fn lesser(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => f32::from_bits(a.to_bits() | b.to_bits()),
        _ => a.min(b),
    }
}

/// Of two numbers the greater, or the one that is one.
pub fn greater(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => f32::from_bits(a.to_bits() & b.to_bits()),
        _ => a.max(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_rounded_where_they_are_told_to() {
        let third = 1.0 / 3.0;
        let [down, up] = [Rounding::Down, Rounding::Up].map(|rounding| rounded(third, rounding));
        assert!(f64::from(down) < third && f64::from(up) > third);
        assert_eq!(down.next_up(), up);
        assert_eq!(rounded(-third, Rounding::Zero), -down);
        assert_eq!(rounded(0.5, Rounding::Up), 0.5);
    }

    #[test]
    fn zeros_have_an_order() {
        assert_eq!(greater(-0.0, 0.0).to_bits(), 0);
        assert_eq!(lesser(0.0, -0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(greater(f32::NAN, 1.0), 1.0);
    }
}
