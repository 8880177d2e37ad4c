//! Activations in Burn's primitives.

use crate::linear::activation::kind::Activation;
use crate::linear::values::{ActivationGrads, ActivationSaved, ActivationTask, BiasedRows};
use burn_blocksparse::internal::prelude::*;

/// Slope of the sigmoid of [`Activation::GeluSigmoid`].
const GELU_SLOPE: f64 = 1.702;
/// `2 √(2/π)`: `(1 + tanh y) / 2` is the sigmoid of `2 y`.
const TANH_SLOPE: f64 = 1.595_769_121_605_730_7;
/// Factor of the cubic term.
const TANH_CUBE: f64 = 0.044715;

/// Returns `1 / (1 + exp(−x))`; x is clamped so that the exponential stays finite.
fn sigmoid<B: Backend>(x: Array<B>) -> Array<B> {
    let most = match x.dtype() {
        FloatDType::F64 => 700.0,
        _ => 88.0,
    };
    ((-x.clamp(-most, most)).exp() + 1.0).recip()
}

/// Returns `1 + erf(x / √2)`.
fn one_and_erf<B: Backend>(x: Array<B>) -> Array<B> {
    (x * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0
}

fn value<B: Backend>(x: Array<B>, activation: Activation) -> Array<B> {
    match activation {
        Activation::None => x,
        Activation::GeluSigmoid => x.clone() * sigmoid(x * GELU_SLOPE),
        Activation::GeluTanh => {
            let inner = x.clone() * &x * TANH_CUBE + 1.0;
            x.clone() * sigmoid(x * TANH_SLOPE * inner)
        }
        Activation::GeluErf => x.clone() * 0.5 * one_and_erf(x),
        Activation::Relu => x.at_least(0.0),
        Activation::Silu => x.clone() * sigmoid(x),
    }
}

/// Returns `s (1 + x (1 − s))`, the derivative of `x · sigmoid(x)` with `s = sigmoid(x)`.
fn swish_slope<B: Backend>(s: Array<B>, x: Array<B>) -> Array<B> {
    s.clone() * (x * (-s + 1.0) + 1.0)
}

/// Multiplies `grad` by the derivative at x.
fn by_x<B: Backend>(grad: Array<B>, x: Array<B>, activation: Activation) -> Array<B> {
    let slope = match activation {
        Activation::None => return grad,
        Activation::GeluSigmoid => {
            let scaled = x * GELU_SLOPE;
            swish_slope(sigmoid(scaled.clone()), scaled)
        }
        Activation::GeluTanh => {
            // Beyond ±30 the derivative is 0 or 1 in every dtype, and the cube would overflow.
            let x = x.clamp(-30.0, 30.0);
            let square = x.clone() * &x * TANH_CUBE;
            let scaled = x * TANH_SLOPE;
            let inner = scaled.clone() * (square.clone() + 1.0);
            swish_slope(sigmoid(inner), scaled * (square * 3.0 + 1.0))
        }
        Activation::GeluErf => {
            // Beyond ±30 the density is 0 in every dtype, and the square would overflow.
            let near = x.clone().clamp(-30.0, 30.0);
            let density = (near.clone() * &near * -0.5).exp();
            let density = density * (2.0 * std::f64::consts::PI).sqrt().recip();
            one_and_erf(x) * 0.5 + near * density
        }
        // 1 where x is positive, 0 elsewhere.
        Activation::Relu => x.at_least(0.0).sign(),
        Activation::Silu => swish_slope(sigmoid(x.clone()), x),
    };
    grad * slope
}

/// Returns `x + bias` in the dtype of sums.
fn biased<B: Backend>(x: FloatTensor<B>, bias: OptFloat<B>) -> Array<B> {
    let x = Array::<B>(x);
    let sums = accumulate_in(x.dtype());
    let x = x.cast(sums);
    match bias {
        OptFloat::None => x,
        OptFloat::Some(bias) => {
            let mut spread = vec![1; x.shape().num_dims()];
            *spread.last_mut().expect("a dimension") = bias.shape()[0];
            x + Array::<B>(bias).cast(sums).reshape(spread)
        }
    }
}

pub(crate) fn forward<B: Backend>(inputs: BiasedRows<B>, activation: Activation) -> FloatTensor<B> {
    let dtype = FloatDType::from(inputs.x.dtype());
    let x = biased(inputs.x, inputs.bias);
    value(x, activation).cast(dtype).0
}

pub(crate) fn backward<B: Backend>(
    saved: ActivationSaved<B>,
    activation: Activation,
    task: ActivationTask,
) -> ActivationGrads<B> {
    let ActivationSaved { x, bias, grad } = saved;
    let grad = Array::<B>(grad);
    let dtype = grad.dtype();
    let [rows, width] = matrix(&grad.shape());
    let grad = grad.cast(accumulate_in(dtype));
    let x = x.into_option().map(|x| biased::<B>(x, bias));
    let y = (x.clone().filter(|_| task.y)).map(|x| value(x, activation).cast(dtype).0);
    let grad = match x {
        Some(x) => by_x(grad, x, activation),
        None => grad,
    };
    let bias = task.bias.map(|dtype| {
        let sums = grad.clone().reshape([rows, width]).sum_dim(0);
        sums.reshape([width]).cast(dtype).0
    });
    ActivationGrads {
        x: task.x.then(|| grad.cast(dtype).0).into(),
        bias: bias.into(),
        y: y.into(),
    }
}
