//! `setp` (PTX ISA, sections 9.7.6 and 9.7.7).

use std::cmp::Ordering::{Equal, Greater, Less};

use super::Type;
use super::instruction::Lanes;
use super::lanes::{by_integer, by_type};
use super::numbers::{BF16, F16, F32, F64, Float};

macro_rules! holds {
    ($value:expr, $found:pat) => {
        Some(|a, b| {
            std::array::from_fn(|lane| {
                let [a, b] = [a[lane], b[lane]].map($value);
                match a.partial_cmp(&b) {
                    $found => 1,
                    _ => 0,
                }
            })
        })
    };
}
/// Selects the relation of a name. Relations that end in `u` also hold if an operand is NaN.
macro_rules! relation {
    ($name:expr, $value:expr) => {
        match $name {
            "eq" => holds!($value, Some(Equal)),
            "ne" => holds!($value, Some(Less | Greater)),
            "lt" | "lo" => holds!($value, Some(Less)),
            "le" | "ls" => holds!($value, Some(Less | Equal)),
            "gt" | "hi" => holds!($value, Some(Greater)),
            "ge" | "hs" => holds!($value, Some(Greater | Equal)),
            "equ" => holds!($value, Some(Equal) | None),
            "neu" => holds!($value, Some(Less | Greater) | None),
            "ltu" => holds!($value, Some(Less) | None),
            "leu" => holds!($value, Some(Less | Equal) | None),
            "gtu" => holds!($value, Some(Greater) | None),
            "geu" => holds!($value, Some(Greater | Equal) | None),
            "num" => holds!($value, Some(Less | Equal | Greater)),
            "nan" => holds!($value, None),
            _ => None,
        }
    };
}

/// Returns the predicate of a comparison of two registers.
pub fn comparison(modifiers: &[&str], kind: Type) -> Option<fn(&Lanes, &Lanes) -> Lanes> {
    let name = *modifiers.first()?;
    match kind {
        Type::F32 => relation!(name, F32::of),
        Type::F64 => relation!(name, F64::of),
        Type::F16 => relation!(name, F16::of),
        Type::BF16 => relation!(name, BF16::of),
        Type::Predicate => None,
        _ => by_integer!(kind, T => relation!(name, |x| x as T)),
    }
}
