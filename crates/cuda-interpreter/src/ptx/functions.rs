//! Functions of registers alone, by name.

use super::Type;
use super::floats::float;
use super::instruction::Pure;
use super::integers::{bits, integer};
use super::lanes::lanes;

/// Returns the function of registers of `name` with its modifiers.
pub fn pure(name: &str, modifiers: &[&str], kinds: &[Type]) -> Option<Pure> {
    let kind = *kinds.last()?;
    match name {
        "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "neg" | "abs"
        | "sad" | "mul24" => match kind.is_integer() {
            true => integer(name, modifiers, kind),
            false => float(name, modifiers, kind),
        },
        "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" => {
            float(name, modifiers, kind)
        }
        "selp" => Some(lanes!(|a, b, p| if p & 1 == 1 { a } else { b })),
        _ => bits(name, kind, modifiers),
    }
}
