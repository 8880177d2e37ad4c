//! Softcaps of the tensor-core tiers: `softcap · tanh x`.
//!
//! A tanh by exponential and reciprocal takes two special-function instructions, of which a multiprocessor starts 16 per cycle; the weight's own
//! exponential is a third. PTX's `tanh` is one instruction, but accurate to eleven bits only. So if all products of a warp are `NEAR`, as they mostly are,
//! tanh is a polynomial.

use cubecl::prelude::*;

use crate::arch::ptx::{above_any, exp2, larger, multiply_add, reciprocal};

/// Largest argument of `tanh` for which the polynomial is used.
const NEAR: f32 = 0.75;

/// Equals `2 log2 e`: `tanh x = 1 − 2 / (1 + exp2 y)` with `y = 2 log2 e · x`. The polynomial takes `y` too.
const TO_POWER: f32 = 2.0 * std::f32::consts::LOG2_E;

/// `tanh x / y` as a polynomial of `y²`, lowest power first: the best five coefficients for `|x| ≤ 0.75` by Remez's exchange. Its relative error is below
/// 7e-7, and below 8e-7 in f32.
const COEFFICIENTS: [f32; 5] = [
    0.346_573_38,
    -0.013_873_911,
    0.000_662_960_34,
    -3.006_263_4e-5,
    9.327_073e-7,
];

/// Numbers that are capped in parallel, so that none waits for the instruction before its own.
const TOGETHER: usize = 4;

/// Initialises the largest absolute products of a unit.
#[cube]
pub fn no_products() -> Array<f32> {
    let mut largest = Array::<f32>::new(TOGETHER);
    #[unroll]
    for i in 0..TOGETHER {
        largest[i] = 0.0f32.runtime();
    }
    largest
}

/// Updates the largest absolute products.
#[cube]
pub fn with_products<S: Size>(largest: &mut Array<f32>, s: Vector<f32, S>) {
    #[unroll]
    for i in 0..S::value() {
        let at = comptime!(i % TOGETHER);
        largest[at] = larger(largest[at], s.extract(i).abs());
    }
}

/// Whether any unit of the warp has a product whose argument is beyond `NEAR`.
#[cube]
pub fn any_far(largest: &Array<f32>, cap_scale: f32) -> bool {
    let first = larger(largest[0], largest[1]);
    let largest = larger(first, larger(largest[2], largest[3]));
    let far = largest * cap_scale.abs() > comptime!(NEAR * TO_POWER);
    above_any(u32::cast_from(far)) != 0u32
}

/// Softcaps products: `softcap · tanh x`, with `x = product · cap_scale / 2 log2 e`. With `near`, uses the polynomial, for which all products must be near.
#[cube]
pub fn softcap_products<S: Size>(
    s: &mut Vector<f32, S>,
    softcap: f32,
    cap_scale: f32,
    #[comptime] near: bool,
) {
    if comptime!(near) {
        #[unroll]
        for i in 0..S::value() {
            if comptime!(i % TOGETHER == 0) {
                softcap_near::<S>(s, softcap, cap_scale, i);
            }
        }
    } else {
        #[unroll]
        for i in 0..S::value() {
            let power = exp2(s.extract(i) * cap_scale);
            let capped = multiply_add(-2.0f32 * softcap, reciprocal(1.0f32 + power), softcap);
            s.insert(i, capped);
        }
    }
}

/// Softcaps [`TOGETHER`] products from index `first` on with the polynomial.
#[cube]
fn softcap_near<S: Size>(
    s: &mut Vector<f32, S>,
    softcap: f32,
    cap_scale: f32,
    #[comptime] first: usize,
) {
    let mut squares = Array::<f32>::new(TOGETHER);
    let mut sums = Array::<f32>::new(TOGETHER);
    #[unroll]
    for i in 0..TOGETHER {
        let y = s.extract(comptime!(first + i)) * cap_scale;
        squares[i] = y * y;
        s.insert(comptime!(first + i), y);
    }
    #[unroll]
    for i in 0..TOGETHER {
        let highest = f32::new(COEFFICIENTS[4]);
        sums[i] = multiply_add(highest, squares[i], f32::new(COEFFICIENTS[3]));
    }
    #[unroll]
    for power in 0..3usize {
        let coefficient = comptime!(COEFFICIENTS[2 - power]);
        #[unroll]
        for i in 0..TOGETHER {
            sums[i] = multiply_add(sums[i], squares[i], f32::new(coefficient));
        }
    }
    #[unroll]
    for i in 0..TOGETHER {
        let at = comptime!(first + i);
        s.insert(at, s.extract(at) * softcap * sums[i]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polynomial_is_tanh() {
        for i in 1..=1000 {
            let x = f64::from(NEAR) * f64::from(i) / 1000.0;
            let y = x * f64::from(TO_POWER);
            let sum = COEFFICIENTS
                .iter()
                .rev()
                .fold(0.0, |sum, &c| sum * y * y + f64::from(c));
            let error = (y * sum / x.tanh() - 1.0).abs();
            assert!(error < 7e-7, "tanh {x} is off by {error:e} of itself");
        }
    }
}
