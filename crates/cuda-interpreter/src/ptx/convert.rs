//! `cvt` (PTX ISA, section 9.7.9).

use super::Type;
use super::instruction::Pure;
use super::lanes::{one, two};
use super::numbers::{
    Rounding, bf16_to_f32, f16_to_f32, f32_of, f32_to_bf16, f32_to_f16, f64_of, of_f32, rounded,
    saturated, whole,
};

/// The conversion to the first of two types, or of two numbers to a pair in half precision.
pub fn conversion(modifiers: &[&str], to: Type, from: Type) -> Option<Pure> {
    let saturates = modifiers.contains(&"sat");
    let relu = modifiers.contains(&"relu");
    if relu || modifiers.contains(&"satfinite") {
        return None;
    }
    if to == Type::BF16x2 && from == Type::F32 {
        return Some(two!(|high, low| pair(f32_to_bf16, high, low)));
    }
    if to == Type::F16x2 && from == Type::F32 {
        return Some(two!(|high, low| pair(f32_to_f16, high, low)));
    }
    if to.is_integer() && from.is_integer() {
        return integers(to, from, saturates);
    }
    let rounding = modifiers
        .iter()
        .find_map(|text| Rounding::named(text))
        .unwrap_or(Rounding::Nearest);
    // A value goes through f64, which holds all of every other float and of 32-bit integers.
    macro_rules! through {
        ($from:expr) => {
            match (to, rounding) {
                (Type::F64, _) => {
                    one!(|x| ($from)(x).to_bits())
                }
                (Type::BF16, _) => one!(|x| f32_to_bf16(($from)(x) as f32).into()),
                (Type::F16, _) => one!(|x| f32_to_f16(($from)(x) as f32).into()),
                (Type::F32, _) if saturates => {
                    one!(|x| of_f32(saturated(($from)(x) as f32)))
                }
                (Type::F32, Rounding::Nearest) => {
                    one!(|x| of_f32(($from)(x) as f32))
                }
                (Type::F32, Rounding::Zero) => {
                    one!(|x| of_f32(rounded(($from)(x), Rounding::Zero)))
                }
                (Type::F32, Rounding::Down) => {
                    one!(|x| of_f32(rounded(($from)(x), Rounding::Down)))
                }
                (Type::F32, Rounding::Up) => one!(|x| of_f32(rounded(($from)(x), Rounding::Up))),
                _ => return to_integer(to, from, rounding),
            }
        };
    }
    let whole_f32 = modifiers
        .iter()
        .any(|text| matches!(*text, "rni" | "rzi" | "rmi" | "rpi"));
    if whole_f32 && to == Type::F32 && from == Type::F32 {
        return Some(match rounding {
            Rounding::Nearest => {
                one!(|x| integral(x, Rounding::Nearest))
            }
            Rounding::Zero => {
                one!(|x| integral(x, Rounding::Zero))
            }
            Rounding::Down => {
                one!(|x| integral(x, Rounding::Down))
            }
            Rounding::Up => {
                one!(|x| integral(x, Rounding::Up))
            }
        });
    }
    Some(match from {
        Type::F32 => through!(|x| f64::from(f32_of(x))),
        Type::F64 => through!(f64_of),
        Type::F16 => through!(|x| f64::from(f16_to_f32(x as u16))),
        Type::BF16 => through!(|x| f64::from(bf16_to_f32(x as u16))),
        Type::Signed(8) => through!(|x| f64::from(x as i8)),
        Type::Signed(16) => through!(|x| f64::from(x as i16)),
        Type::Signed(32) => through!(|x| f64::from(x as i32)),
        Type::Signed(64) => through!(|x| x as i64 as f64),
        Type::Unsigned(8) => through!(|x| f64::from(x as u8)),
        Type::Unsigned(16) => through!(|x| f64::from(x as u16)),
        Type::Unsigned(32) => through!(|x| f64::from(x as u32)),
        Type::Unsigned(64) => through!(|x| x as f64),
        _ => return None,
    })
}

fn pair(half: fn(f32) -> u16, high: u64, low: u64) -> u64 {
    u64::from(half(f32_of(high))) << 16 | u64::from(half(f32_of(low)))
}

fn integral(bits: u64, rounding: Rounding) -> u64 {
    of_f32(whole(f32_of(bits).into(), rounding) as f32)
}

fn integers(to: Type, from: Type, saturates: bool) -> Option<Pure> {
    macro_rules! from_integer {
        ($From:ty) => {
            match (to, saturates) {
                (Type::Unsigned(8), true) => narrowed!($From, u8),
                (Type::Signed(8), true) => narrowed!($From, i8),
                (Type::Unsigned(32), true) => narrowed!($From, u32),
                (Type::Signed(32), true) => narrowed!($From, i32),
                (_, true) => return None,
                // A narrow result fills its register.
                (Type::Unsigned(8), false) => cast!($From, u8),
                (Type::Signed(8), false) => cast!($From, i8),
                (Type::Unsigned(16), false) => cast!($From, u16),
                (Type::Signed(16), false) => cast!($From, i16),
                (_, false) => cast!($From, i128),
            }
        };
    }
    macro_rules! cast {
        ($From:ty, $To:ty) => {
            one!(|x| (x as $From) as $To as u64)
        };
    }
    macro_rules! narrowed {
        ($From:ty, $To:ty) => {
            one!(|x| {
                let value = i128::from(x as $From);
                value.clamp(<$To>::MIN.into(), <$To>::MAX.into()) as u64
            })
        };
    }
    Some(match from {
        Type::Signed(8) => from_integer!(i8),
        Type::Signed(16) => from_integer!(i16),
        Type::Signed(32) => from_integer!(i32),
        Type::Signed(64) => from_integer!(i64),
        Type::Unsigned(8) => from_integer!(u8),
        Type::Unsigned(16) => from_integer!(u16),
        Type::Unsigned(32) => from_integer!(u32),
        Type::Unsigned(64) => from_integer!(u64),
        _ => return None,
    })
}

/// Floats out of an integer's range become its ends, and NaN 0.
fn to_integer(to: Type, from: Type, rounding: Rounding) -> Option<Pure> {
    macro_rules! to_whole {
        ($To:ty, $rounding:expr) => {
            match from {
                Type::F32 => one!(|x| whole(f32_of(x).into(), $rounding) as $To as u64),
                Type::F64 => one!(|x| whole(f64_of(x), $rounding) as $To as u64),
                Type::F16 => one!(|x| whole(f16_to_f32(x as u16).into(), $rounding) as $To as u64),
                Type::BF16 => {
                    one!(|x| whole(bf16_to_f32(x as u16).into(), $rounding) as $To as u64)
                }
                _ => return None,
            }
        };
    }
    macro_rules! by_rounding {
        ($To:ty) => {
            match rounding {
                Rounding::Nearest => to_whole!($To, Rounding::Nearest),
                Rounding::Zero => to_whole!($To, Rounding::Zero),
                Rounding::Down => to_whole!($To, Rounding::Down),
                Rounding::Up => to_whole!($To, Rounding::Up),
            }
        };
    }
    Some(match to {
        Type::Signed(8) => by_rounding!(i8),
        Type::Signed(16) => by_rounding!(i16),
        Type::Signed(32) => by_rounding!(i32),
        Type::Signed(64) => by_rounding!(i64),
        Type::Unsigned(8) => by_rounding!(u8),
        Type::Unsigned(16) => by_rounding!(u16),
        Type::Unsigned(32) => by_rounding!(u32),
        Type::Unsigned(64) => by_rounding!(u64),
        _ => return None,
    })
}
