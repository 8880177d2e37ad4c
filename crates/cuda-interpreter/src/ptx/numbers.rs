//! Floating-point numbers in registers.

use blocksparse::Quantization;
use half::{bf16, f16};

/// Converts to E4M3. Numbers beyond ±448 saturate.
fn f32_to_e4m3(value: f32) -> u8 {
    match value.is_nan() {
        true => 0x7f,
        false => Quantization::Fp8E4m3.encode(value),
    }
}

/// Rounding of a result to a representable number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
    /// Clamped to `[0, 1]`. NaN becomes 0.
    Saturated,
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

/// A type that is computed in f64: sums, products and quotients of narrower numbers are then rounded once.
pub trait Float {
    fn of(bits: u64) -> f64;
    fn bits(value: f64) -> u64;
}

macro_rules! floats {
    ($($T:ident: |$bits:ident| $of:expr, |$value:ident| $to:expr;)*) => {
        $(
            pub struct $T;

            impl Float for $T {
                fn of($bits: u64) -> f64 {
                    $of.into()
                }

                fn bits($value: f64) -> u64 {
                    $to.into()
                }
            }
        )*
    };
}

// The last four are f32 with other rounding modes.
floats! {
    F64: |bits| f64::from_bits(bits), |value| value.to_bits();
    F16: |bits| f16::from_bits(bits as u16), |value| f16::from_f32(value as f32).to_bits();
    BF16: |bits| bf16::from_bits(bits as u16), |value| bf16::from_f32(value as f32).to_bits();
    E4M3: |bits| Quantization::Fp8E4m3.decode(bits as u8), |value| f32_to_e4m3(value as f32);
    F32: |bits| f32::from_bits(bits as u32), |value| (value as f32).to_bits();
    F32Zero: |bits| f32::from_bits(bits as u32), |value| rounded(value, Rounding::Zero).to_bits();
    F32Down: |bits| f32::from_bits(bits as u32), |value| rounded(value, Rounding::Down).to_bits();
    F32Up: |bits| f32::from_bits(bits as u32), |value| rounded(value, Rounding::Up).to_bits();
    F32Saturated: |bits| f32::from_bits(bits as u32), |value| rounded(value, Rounding::Saturated).to_bits();
}

/// Rounds to an f32.
fn rounded(exact: f64, rounding: Rounding) -> f32 {
    let nearest = exact as f32;
    let off = f64::from(nearest) - exact;
    match rounding {
        Rounding::Saturated if nearest > 0.0 => nearest.min(1.0),
        Rounding::Saturated => 0.0,
        Rounding::Down if off > 0.0 => nearest.next_down(),
        Rounding::Up if off < 0.0 => nearest.next_up(),
        Rounding::Zero if off > 0.0 && exact > 0.0 => nearest.next_down(),
        Rounding::Zero if off < 0.0 && exact < 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

/// Returns the lesser of two numbers, or the one that is not NaN.
pub fn lesser(a: f64, b: f64) -> f64 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => f64::from_bits(a.to_bits() | b.to_bits()),
        _ => a.min(b),
    }
}

/// Returns the greater of two numbers, or the one that is not NaN.
pub fn greater(a: f64, b: f64) -> f64 {
    -lesser(-a, -b)
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
        assert_eq!(
            [1.5, f64::NAN].map(|x| rounded(x, Rounding::Saturated)),
            [1.0, 0.0]
        );
    }

    #[test]
    fn zeros_have_an_order() {
        assert_eq!(greater(-0.0, 0.0).to_bits(), 0);
        assert_eq!(lesser(0.0, -0.0).to_bits(), (-0.0f64).to_bits());
        assert_eq!(greater(f64::NAN, 1.0), 1.0);
    }
}
