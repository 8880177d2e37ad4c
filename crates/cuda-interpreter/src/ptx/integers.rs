//! Integer and bit instructions (PTX ISA, sections 9.7.1, 9.7.2 and 9.7.8).
//!
//! A register holds 64 bits. The bits above a narrower type are never read.
#![expect(
    clippy::unnecessary_cast,
    reason = "a function stands for every width, that of registers included"
)]

use super::Type;
use super::instruction::Pure;
use super::lanes::{by_integer, by_type, lanes};

const LOW: u64 = u32::MAX as u64;

fn both(low: u64, high: u64) -> u64 {
    low & LOW | high << 32
}

/// Returns the integer function of `name` with its modifiers.
pub fn integer(name: &str, modifiers: &[&str], kind: Type) -> Option<Pure> {
    let has = |modifier: &str| modifiers.contains(&modifier);
    let wide = has("wide");
    Some(match name {
        "add" => by_integer!(kind, T => lanes!(|a, b| (a as T).wrapping_add(b as T) as u64)),
        "sub" => by_integer!(kind, T => lanes!(|a, b| (a as T).wrapping_sub(b as T) as u64)),
        "mul" if wide => {
            by_integer!(kind, T => lanes!(|a, b| i128::from(a as T).wrapping_mul(i128::from(b as T)) as u64))
        }
        "mul" if has("hi") => by_integer!(kind, T => lanes!(|a, b| high(a as T, b as T, T::BITS))),
        "mul" => by_integer!(kind, T => lanes!(|a, b| (a as T).wrapping_mul(b as T) as u64)),
        "mul24" => lanes!(|a, b| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff)),
        "mad" if wide => by_integer!(kind, T => lanes!(|a, b, c| {
            (i128::from(a as T).wrapping_mul(i128::from(b as T)) as u64).wrapping_add(c)
        })),
        "mad" if has("hi") => {
            by_integer!(kind, T => lanes!(|a, b, c| high(a as T, b as T, T::BITS).wrapping_add(c)))
        }
        "mad" => {
            by_integer!(kind, T => lanes!(|a, b, c| (a as T).wrapping_mul(b as T).wrapping_add(c as T) as u64))
        }
        "div" => {
            by_integer!(kind, T => lanes!(|a, b| (a as T).checked_div(b as T).unwrap_or(T::MAX) as u64))
        }
        "rem" => {
            by_integer!(kind, T => lanes!(|a, b| (a as T).checked_rem(b as T).unwrap_or(a as T) as u64))
        }
        "min" => by_integer!(kind, T => lanes!(|a, b| (a as T).min(b as T) as u64)),
        "max" => by_integer!(kind, T => lanes!(|a, b| (a as T).max(b as T) as u64)),
        "neg" => by_integer!(kind, T => lanes!(|a| (a as T).wrapping_neg() as u64)),
        "abs" => by_integer!(kind, T => lanes!(|a| (a as T).max((a as T).wrapping_neg()) as u64)),
        "sad" => {
            by_integer!(kind, T => lanes!(|a, b, c| ((a as T).abs_diff(b as T) as u64).wrapping_add(c)))
        }
        _ => return None,
    })
}

fn high<T: Into<i128>>(a: T, b: T, bits: u32) -> u64 {
    (a.into().wrapping_mul(b.into()) >> bits) as u64
}

/// Returns the bit function of `name`.
pub fn bits(name: &str, kind: Type, modifiers: &[&str]) -> Option<Pure> {
    let wide = kind.bytes() == 8;
    let has = |modifier: &str| modifiers.contains(&modifier);
    Some(match name {
        "and" => lanes!(|a, b| a & b),
        "or" => lanes!(|a, b| a | b),
        "xor" => lanes!(|a, b| a ^ b),
        "not" if kind == Type::Predicate => lanes!(|a| a & 1 ^ 1),
        "not" => lanes!(|a| !a),
        "cnot" => by_integer!(kind, T => lanes!(|a| u64::from(a as T == 0))),
        "shl" => {
            by_integer!(kind, T => lanes!(|a, by| (a as T).checked_shl(by as u32).unwrap_or(0) as u64))
        }
        "shr" => by_integer!(kind, T => lanes!(|a, by| {
            // Shifts beyond the width fill with the sign.
            (a as T >> (by as u32).min(T::BITS - 1) >> u32::from(by as u32 >= T::BITS)) as u64
        })),
        "popc" if wide => lanes!(|a| a.count_ones().into()),
        "popc" => lanes!(|a| (a as u32).count_ones().into()),
        "clz" if wide => lanes!(|a| a.leading_zeros().into()),
        "clz" => lanes!(|a| (a as u32).leading_zeros().into()),
        "brev" if wide => lanes!(|a| a.reverse_bits()),
        "brev" => lanes!(|a| (a as u32).reverse_bits().into()),
        "bfind" => match (kind, has("shiftamt")) {
            (Type::Unsigned(32), true) => lanes!(|a| match a as u32 {
                0 => LOW,
                a => a.leading_zeros().into(),
            }),
            (Type::Unsigned(32), false) => lanes!(|a| match a as u32 {
                0 => LOW,
                a => (31 - a.leading_zeros()).into(),
            }),
            (Type::Unsigned(64), false) => lanes!(|a| match a {
                0 => LOW,
                a => (63 - a.leading_zeros()).into(),
            }),
            _ => return None,
        },
        "shf" => match (has("l"), has("wrap")) {
            (true, true) => lanes!(|low, high, by| (both(low, high) << (by & 31)) >> 32 & LOW),
            (true, false) => {
                lanes!(|low, high, by| (both(low, high) << (by & LOW).min(32)) >> 32 & LOW)
            }
            (false, true) => lanes!(|low, high, by| both(low, high) >> (by & 31) & LOW),
            (false, false) => lanes!(|low, high, by| both(low, high) >> (by & LOW).min(32) & LOW),
        },
        "bfi" if wide => lanes!(|field, into, at, length| insert(field, into, at, length, 64)),
        "bfi" => lanes!(|field, into, at, length| insert(field, into, at, length, 32)),
        "bfe" => match kind {
            Type::Unsigned(32) => {
                lanes!(|a, at, length| (a & LOW) >> (at & 255).min(63) & ones(length))
            }
            Type::Unsigned(64) => lanes!(|a, at, length| shifted(a, at) & ones(length)),
            _ => return None,
        },
        "prmt" => lanes!(|a, b, selector| {
            let bytes = both(a, b).to_le_bytes();
            let chosen = |nibble: u64| {
                let byte = bytes[(nibble & 7) as usize];
                if nibble & 8 == 0 {
                    byte
                } else {
                    ((byte as i8) >> 7) as u8
                }
            };
            (0..4)
                .map(|at| u64::from(chosen(selector >> (4 * at))) << (8 * at))
                .sum()
        }),
        "lop3" => lanes!(|a, b, c, table| {
            (0..8)
                .filter(|row| table >> row & 1 == 1)
                .fold(0, |out, row| {
                    let term = |x: u64, bit: u64| if row >> bit & 1 == 1 { x } else { !x };
                    out | term(a, 2) & term(b, 1) & term(c, 0)
                })
        }),
        _ => return None,
    })
}

fn shifted(a: u64, by: u64) -> u64 {
    a.checked_shr((by & 255) as u32).unwrap_or(0)
}

fn ones(length: u64) -> u64 {
    (1u64.checked_shl((length & 255) as u32).unwrap_or(0)).wrapping_sub(1)
}

fn insert(field: u64, into: u64, at: u64, length: u64, width: u64) -> u64 {
    let (at, length) = (at & 255, length & 255);
    if at >= width {
        return into;
    }
    let mask = ones(length.min(width - at)) << at;
    into & !mask | field << at & mask
}
