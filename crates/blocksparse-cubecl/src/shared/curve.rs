//! Activations and their derivatives, elementwise.

use cubecl::prelude::*;

use crate::arch::ptx;

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationKind {
    /// Identity.
    None,
    /// `x · sigmoid(1.702 x)`.
    GeluSigmoid,
    /// `x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
    /// `x / 2 · (1 + erf(x / √2))`.
    GeluErf,
    /// `max(x, 0)`.
    Relu,
    /// `x · sigmoid(x)`.
    Silu,
}

/// An activation function and its precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Curve {
    /// The activation function.
    pub activation: ActivationKind,
    /// Whether to use the device's approximate exponential and reciprocal, where results are rounded to half precision anyway.
    pub fast: bool,
}

/// Slope of the sigmoid in [`ActivationKind::GeluSigmoid`].
const GELU_SLOPE: f64 = 1.702;
/// Equals `2 √(2/π)`, because `(1 + tanh y) / 2` is the sigmoid of `2 y`.
const TANH_SLOPE: f64 = 1.595_769_121_605_730_7;
/// Factor of the cubic term in [`ActivationKind::GeluTanh`].
const TANH_CUBE: f64 = 0.044_715;

/// Returns `1 / (1 + exp(−x))`. The argument is clamped where the exponential would overflow, since not every device has infinities.
#[cube]
fn sigmoid<A: Float, N: Size>(x: Vector<A, N>, #[comptime] fast: bool) -> Vector<A, N> {
    match comptime!(fast) {
        true => fast_sigmoid::<A, N>(x),
        false => exact_sigmoid::<A, N>(x),
    }
}

/// Computes the sigmoid with the device's approximate instructions, each within two ulp of f32. With the exact ones the kernels are no longer bound by
/// memory.
#[cube]
fn fast_sigmoid<A: Float, N: Size>(x: Vector<A, N>) -> Vector<A, N> {
    let mut result = Vector::<A, N>::empty();
    #[unroll]
    for c in 0..N::value() {
        let power = f32::cast_from(x.extract(c)) * (-std::f32::consts::LOG2_E);
        // If the power is infinite, its reciprocal is 0.
        let one = ptx::reciprocal(ptx::exp2(power) + 1.0);
        result.insert(c, A::cast_from(one));
    }
    result
}

#[cube]
fn exact_sigmoid<A: Float, N: Size>(x: Vector<A, N>) -> Vector<A, N> {
    let one = filled::<A, N>(1.0);
    // exp(88) is still finite in f32, and 1 / exp(88) is below the rounding error.
    let wide = A::size_bits().comptime() == 64;
    let most = filled::<A, N>(comptime!(if wide { 700.0 } else { 88.0 }));
    let x = x.min(most).max(-most);
    one / (one + (-x).exp())
}

/// Returns a constant vector. In f64 the constant is the sum of two f32 numbers, because literals in kernels are f32.
#[cube]
fn filled<A: Float, N: Size>(#[comptime] number: f64) -> Vector<A, N> {
    let high = comptime!(number as f32);
    let low = comptime!((number - number as f32 as f64) as f32);
    let constant = match comptime!(low == 0.0) {
        true => A::new(high),
        false => A::new(high) + A::new(low),
    };
    Vector::<A, N>::empty().fill(constant)
}

/// Returns the activation of `x`.
#[cube]
pub fn value<A: Float, N: Size>(x: Vector<A, N>, #[comptime] c: Curve) -> Vector<A, N> {
    match comptime!(c.activation) {
        ActivationKind::None => x,
        ActivationKind::GeluSigmoid => x * sigmoid::<A, N>(x * filled::<A, N>(GELU_SLOPE), c.fast),
        ActivationKind::GeluTanh => {
            let inner = filled::<A, N>(1.0) + filled::<A, N>(TANH_CUBE) * x * x;
            x * sigmoid::<A, N>(filled::<A, N>(TANH_SLOPE) * x * inner, c.fast)
        }
        ActivationKind::GeluErf => {
            let half = filled::<A, N>(0.5);
            let scaled = x * filled::<A, N>(std::f64::consts::FRAC_1_SQRT_2);
            x * half * (filled::<A, N>(1.0) + scaled.erf())
        }
        ActivationKind::Relu => x.max(filled::<A, N>(0.0)),
        ActivationKind::Silu => x * sigmoid::<A, N>(x, c.fast),
    }
}

/// Returns the derivative of the activation at `x`.
#[cube]
pub fn slope<A: Float, N: Size>(x: Vector<A, N>, #[comptime] c: Curve) -> Vector<A, N> {
    let one = filled::<A, N>(1.0);
    match comptime!(c.activation) {
        ActivationKind::None => one,
        ActivationKind::GeluSigmoid => {
            let scaled = x * filled::<A, N>(GELU_SLOPE);
            let s = sigmoid::<A, N>(scaled, c.fast);
            s * (one + scaled * (one - s))
        }
        ActivationKind::GeluTanh => {
            // Beyond ±30 the sigmoid is 0 or 1 in every type, and the cubic term would overflow.
            let most = filled::<A, N>(30.0);
            let x = x.min(most).max(-most);
            let square = x * x;
            let scaled = filled::<A, N>(TANH_SLOPE) * x;
            let s = sigmoid::<A, N>(scaled * (one + filled::<A, N>(TANH_CUBE) * square), c.fast);
            let inner = scaled * (one + filled::<A, N>(comptime!(3.0 * TANH_CUBE)) * square);
            s * (one + inner * (one - s))
        }
        ActivationKind::GeluErf => {
            let half = filled::<A, N>(0.5);
            let scaled = x * filled::<A, N>(std::f64::consts::FRAC_1_SQRT_2);
            // Beyond ±30 the density is 0 in every type, and x² would overflow.
            let most = filled::<A, N>(30.0);
            let near = x.min(most).max(-most);
            // The constant is 1 / √(2π).
            let density = filled::<A, N>(0.398_942_280_401_432_7) * (-half * near * near).exp();
            half * (one + scaled.erf()) + near * density
        }
        ActivationKind::Relu => {
            let zero = filled::<A, N>(0.0);
            select_many(x.greater_than(&zero), one, zero)
        }
        ActivationKind::Silu => {
            let s = sigmoid::<A, N>(x, c.fast);
            s * (one + x * (one - s))
        }
    }
}
