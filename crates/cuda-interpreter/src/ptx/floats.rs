//! Floating-point instructions (PTX ISA, sections 9.7.3 to 9.7.5).

use super::Type;
use super::instruction::Pure;
use super::lanes::{by_float, by_type, lanes};
use super::numbers::{
    BF16, F16, F32, F32Down, F32Saturated, F32Up, F32Zero, F64, Float, Rounding, greater, lesser,
};

/// Returns the floating-point function of `name` with its modifiers.
pub fn float(name: &str, modifiers: &[&str], kind: Type) -> Option<Pure> {
    let has = |modifier: &str| modifiers.contains(&modifier);
    let rounding = match has("sat") {
        true => Some(Rounding::Saturated),
        false => modifiers.iter().find_map(|text| Rounding::named(text)),
    };
    let rounding = rounding.unwrap_or(Rounding::Nearest);
    /// Defines a function of numbers, applied to both halves of pairs.
    macro_rules! numbers {
        (|$($x:ident),+| $value:expr) => {
            match kind {
                Type::F16x2 => pairs!(F16, |$($x),+| $value),
                Type::BF16x2 => pairs!(BF16, |$($x),+| $value),
                _ => by_float!((kind, rounding), T => lanes!(|$($x),+| {
                    $(let $x = T::of($x);)+
                    T::bits($value)
                })),
            }
        };
    }
    macro_rules! pairs {
        ($T:ident, |$($x:ident),+| $value:expr) => {
            lanes!(|$($x),+| {
                let half = |at: u32| {
                    $(let $x = $T::of($x >> at);)+
                    $T::bits($value) << at
                };
                half(0) | half(16)
            })
        };
    }
    Some(match name {
        "add" => numbers!(|a, b| a + b),
        "sub" => numbers!(|a, b| a - b),
        "mul" => numbers!(|a, b| a * b),
        "div" => numbers!(|a, b| a / b),
        "fma" | "mad" if kind == Type::F64 => numbers!(|a, b, c| a.mul_add(b, c)),
        // Products of narrower numbers are exact in f64.
        "fma" | "mad" => numbers!(|a, b, c| a * b + c),
        "copysign" => numbers!(|a, b| b.copysign(a)),
        "min" if has("NaN") => numbers!(|a, b| or_nan(lesser, a, b)),
        "max" if has("NaN") => numbers!(|a, b| or_nan(greater, a, b)),
        "min" => numbers!(|a, b| lesser(a, b)),
        "max" => numbers!(|a, b| greater(a, b)),
        "neg" => numbers!(|a| -a),
        "abs" => numbers!(|a| a.abs()),
        "rcp" => numbers!(|a| 1.0 / a),
        "sqrt" => numbers!(|a| a.sqrt()),
        "rsqrt" => numbers!(|a| 1.0 / a.sqrt()),
        "ex2" => numbers!(|a| a.exp2()),
        "lg2" => numbers!(|a| a.log2()),
        "sin" => numbers!(|a| a.sin()),
        "cos" => numbers!(|a| a.cos()),
        "tanh" => numbers!(|a| a.tanh()),
        _ => return None,
    })
}

fn or_nan(function: fn(f64, f64) -> f64, a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        f64::NAN
    } else {
        function(a, b)
    }
}
