//! Floating-point numbers (PTX ISA, sections 9.7.3 to 9.7.5).

use super::Type;
use super::instruction::Pure;
use super::lanes::{one, three, two};
use super::numbers::{
    Rounding, bf16_to_f32, f16_to_f32, f32_of, f32_to_bf16, f32_to_f16, f64_of, fused, greater,
    lesser, of_f32, rounded, saturated,
};

/// A function of two f32 over the numbers of a floating-point type.
macro_rules! by_float_two {
    ($kind:expr, $f32:expr, $f64:expr) => {
        match $kind {
            Type::F32 => two!(|a, b| of_f32($f32(f32_of(a), f32_of(b)))),
            Type::F64 => two!(|a, b| $f64(f64_of(a), f64_of(b)).to_bits()),
            Type::BF16 => {
                two!(|a, b| f32_to_bf16($f32(bf16_to_f32(a as u16), bf16_to_f32(b as u16))).into())
            }
            Type::F16 => {
                two!(|a, b| f32_to_f16($f32(f16_to_f32(a as u16), f16_to_f32(b as u16))).into())
            }
            Type::BF16x2 => two!(|a, b| halves(|part| {
                f32_to_bf16($f32(
                    bf16_to_f32((a >> part) as u16),
                    bf16_to_f32((b >> part) as u16),
                ))
            })),
            Type::F16x2 => two!(|a, b| halves(|part| {
                f32_to_f16($f32(
                    f16_to_f32((a >> part) as u16),
                    f16_to_f32((b >> part) as u16),
                ))
            })),
            _ => return None,
        }
    };
}

fn halves(part: impl Fn(u32) -> u16) -> u64 {
    u64::from(part(0)) | u64::from(part(16)) << 16
}

/// What `name` with its modifiers computes of floating-point numbers.
pub fn float(name: &str, modifiers: &[&str], kind: Type) -> Option<Pure> {
    let has = |modifier: &str| modifiers.contains(&modifier);
    let rounding = modifiers.iter().find_map(|text| Rounding::named(text));
    let directed = rounding.filter(|&rounding| rounding != Rounding::Nearest);
    Some(match (name, kind) {
        ("add" | "sub" | "mul", Type::F32) if directed.is_some() => {
            return directed_two(name, directed?);
        }
        ("fma", Type::F32) if directed.is_some() => match directed? {
            Rounding::Down => three!(|a, b, c| of_f32(rounded(exact(a, b, c), Rounding::Down))),
            Rounding::Up => three!(|a, b, c| of_f32(rounded(exact(a, b, c), Rounding::Up))),
            _ => three!(|a, b, c| of_f32(rounded(exact(a, b, c), Rounding::Zero))),
        },
        ("add", Type::F32) if has("sat") => two!(|a, b| of_f32(saturated(f32_of(a) + f32_of(b)))),
        ("mul", Type::F32) if has("sat") => two!(|a, b| of_f32(saturated(f32_of(a) * f32_of(b)))),
        ("fma", Type::F32) if has("sat") => {
            three!(|a, b, c| of_f32(saturated(fused(f32_of(a), f32_of(b), f32_of(c)))))
        }
        ("add", _) => by_float_two!(kind, |a: f32, b: f32| a + b, |a: f64, b: f64| a + b),
        ("sub", _) => by_float_two!(kind, |a: f32, b: f32| a - b, |a: f64, b: f64| a - b),
        ("mul", _) => by_float_two!(kind, |a: f32, b: f32| a * b, |a: f64, b: f64| a * b),
        ("div", _) => by_float_two!(kind, |a: f32, b: f32| a / b, |a: f64, b: f64| a / b),
        ("copysign", _) => by_float_two!(kind, |a: f32, b: f32| b.copysign(a), |a: f64, b: f64| b
            .copysign(a)),
        ("min", _) if has("NaN") => {
            by_float_two!(kind, |a: f32, b: f32| or_nan(lesser, a, b), f64::min)
        }
        ("max", _) if has("NaN") => {
            by_float_two!(kind, |a: f32, b: f32| or_nan(greater, a, b), f64::max)
        }
        ("min", _) => by_float_two!(kind, lesser, f64::min),
        ("max", _) => by_float_two!(kind, greater, f64::max),
        ("fma" | "mad", Type::F32) => {
            three!(|a, b, c| of_f32(fused(f32_of(a), f32_of(b), f32_of(c))))
        }
        ("fma" | "mad", Type::F64) => {
            three!(|a, b, c| f64_of(a).mul_add(f64_of(b), f64_of(c)).to_bits())
        }
        ("fma", Type::BF16) => {
            three!(|a, b, c| f32_to_bf16(fused(
                bf16_to_f32(a as u16),
                bf16_to_f32(b as u16),
                bf16_to_f32(c as u16)
            ))
            .into())
        }
        ("fma", Type::F16) => {
            three!(|a, b, c| f32_to_f16(fused(
                f16_to_f32(a as u16),
                f16_to_f32(b as u16),
                f16_to_f32(c as u16)
            ))
            .into())
        }
        ("fma", Type::BF16x2) => three!(|a, b, c| halves(|part| {
            let [a, b, c] = [a, b, c].map(|x| bf16_to_f32((x >> part) as u16));
            f32_to_bf16(fused(a, b, c))
        })),
        ("fma", Type::F16x2) => three!(|a, b, c| halves(|part| {
            let [a, b, c] = [a, b, c].map(|x| f16_to_f32((x >> part) as u16));
            f32_to_f16(fused(a, b, c))
        })),
        // Signs are bits.
        ("neg", Type::F32) => one!(|a| a ^ 0x8000_0000),
        ("neg", Type::F64) => one!(|a| a ^ 1 << 63),
        ("neg", Type::BF16 | Type::F16) => one!(|a| a ^ 0x8000),
        ("neg", Type::BF16x2 | Type::F16x2) => one!(|a| a ^ 0x8000_8000),
        ("abs", Type::F32) => one!(|a| a & 0x7fff_ffff),
        ("abs", Type::F64) => one!(|a| a & !(1 << 63)),
        ("abs", Type::BF16 | Type::F16) => one!(|a| a & 0x7fff),
        ("abs", Type::BF16x2 | Type::F16x2) => one!(|a| a & 0x7fff_7fff),
        ("rcp", Type::F32) => one!(|a| of_f32(1.0 / f32_of(a))),
        ("rcp", Type::F64) => one!(|a| (1.0 / f64_of(a)).to_bits()),
        ("sqrt", Type::F32) => one!(|a| of_f32(f32_of(a).sqrt())),
        ("sqrt", Type::F64) => one!(|a| f64_of(a).sqrt().to_bits()),
        ("rsqrt", Type::F32) => one!(|a| of_f32((1.0 / f64::from(f32_of(a)).sqrt()) as f32)),
        ("ex2", Type::F32) => one!(|a| of_f32(f32_of(a).exp2())),
        ("ex2", Type::BF16) => one!(|a| f32_to_bf16(bf16_to_f32(a as u16).exp2()).into()),
        ("ex2", Type::F16) => one!(|a| f32_to_f16(f16_to_f32(a as u16).exp2()).into()),
        ("lg2", Type::F32) => one!(|a| of_f32(f32_of(a).log2())),
        ("sin", Type::F32) => one!(|a| of_f32(f32_of(a).sin())),
        ("cos", Type::F32) => one!(|a| of_f32(f32_of(a).cos())),
        ("tanh", Type::F32) => one!(|a| of_f32(f32_of(a).tanh())),
        _ => return None,
    })
}

fn exact(a: u64, b: u64, c: u64) -> f64 {
    f64::from(f32_of(a)) * f64::from(f32_of(b)) + f64::from(f32_of(c))
}

fn or_nan(function: fn(f32, f32) -> f32, a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        f32::NAN
    } else {
        function(a, b)
    }
}

/// Sums and products of f32 are exact in f64 but for sums of very unlike numbers.
fn directed_two(name: &str, rounding: Rounding) -> Option<Pure> {
    macro_rules! by_rounding {
        ($operation:tt) => {
            match rounding {
                Rounding::Down => two!(|a, b| {
                    of_f32(rounded(f64::from(f32_of(a)) $operation f64::from(f32_of(b)), Rounding::Down))
                }),
                Rounding::Up => two!(|a, b| {
                    of_f32(rounded(f64::from(f32_of(a)) $operation f64::from(f32_of(b)), Rounding::Up))
                }),
                _ => two!(|a, b| {
                    of_f32(rounded(f64::from(f32_of(a)) $operation f64::from(f32_of(b)), Rounding::Zero))
                }),
            }
        };
    }
    Some(match name {
        "add" => by_rounding!(+),
        "sub" => by_rounding!(-),
        "mul" => by_rounding!(*),
        _ => return None,
    })
}
