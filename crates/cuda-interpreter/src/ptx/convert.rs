//! `cvt` (PTX ISA, section 9.7.9).
#![expect(
    clippy::unnecessary_cast,
    reason = "a conversion stands for every width, that of registers included"
)]

use super::Type;
use super::instruction::Pure;
use super::lanes::{by_float, by_integer, by_type, lanes};
use super::numbers::{BF16, F16, F32, F32Down, F32Saturated, F32Up, F32Zero, F64, Float, Rounding};

/// Returns the conversion to the first of two types, or of two numbers to a pair in half precision.
pub fn conversion(modifiers: &[&str], to: Type, from: Type) -> Option<Pure> {
    let has = |modifier: &str| modifiers.contains(&modifier);
    if has("relu") || has("satfinite") {
        return None;
    }
    let saturates = has("sat");
    let named = modifiers.iter().find_map(|text| Rounding::named(text));
    let rounding = named.unwrap_or(Rounding::Nearest);
    let to_f32 = if saturates {
        Rounding::Saturated
    } else {
        rounding
    };
    // Floats outside of an integer's range are clamped to it, and NaN becomes 0.
    macro_rules! whole {
        ($From:ident, |$value:ident| $to:expr) => {
            match rounding {
                Rounding::Zero => whole!($From, trunc, |$value| $to),
                Rounding::Down => whole!($From, floor, |$value| $to),
                Rounding::Up => whole!($From, ceil, |$value| $to),
                _ => whole!($From, round_ties_even, |$value| $to),
            }
        };
        ($From:ident, $round:ident, |$value:ident| $to:expr) => {
            lanes!(|x| {
                let $value = $From::of(x).$round();
                $to
            })
        };
    }
    Some(match (from.is_integer(), to.is_integer()) {
        _ if to == Type::BF16x2 && from == Type::F32 => {
            lanes!(|high, low| BF16::bits(F32::of(high)) << 16 | BF16::bits(F32::of(low)))
        }
        _ if to == Type::F16x2 && from == Type::F32 => {
            lanes!(|high, low| F16::bits(F32::of(high)) << 16 | F16::bits(F32::of(low)))
        }
        (true, true) if saturates => by_integer!(from, From => by_integer!(to, To => {
            lanes!(|x| i128::from(x as From).clamp(To::MIN.into(), To::MAX.into()) as u64)
        })),
        // A narrow result fills its register.
        (true, true) => {
            by_integer!(from, From => by_integer!(to, To => lanes!(|x| x as From as To as u64)))
        }
        (true, false) => by_integer!(from, From => by_float!((to, to_f32), To => {
            lanes!(|x| To::bits(x as From as f64))
        })),
        (false, true) => by_float!((from, Rounding::Nearest), From => by_integer!(to, To => {
            whole!(From, |value| value as To as u64)
        })),
        (false, false) if (from, to) == (Type::F32, Type::F32) && has_whole(modifiers) => {
            whole!(F32, |value| F32::bits(value))
        }
        // f64 represents all other floats and all 32-bit integers exactly.
        (false, false) => {
            by_float!((from, Rounding::Nearest), From => by_float!((to, to_f32), To => {
                lanes!(|x| To::bits(From::of(x)))
            }))
        }
    })
}

fn has_whole(modifiers: &[&str]) -> bool {
    (modifiers.iter()).any(|text| matches!(*text, "rni" | "rzi" | "rmi" | "rpi"))
}
