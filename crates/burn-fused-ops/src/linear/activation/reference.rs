//! Activations in Burn's primitives.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, Scalar, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};

use crate::linear::activation::kind::Activation;
use crate::linear::values::{ActivationGrads, ActivationSaved, ActivationTask, BiasedRows};
use burn_blocksparse::internal::dtype::accumulate_in;

/// Slope of the sigmoid of [`Activation::GeluSigmoid`].
const GELU_SLOPE: f64 = 1.702;
/// `2 √(2/π)`: `(1 + tanh y) / 2` is the sigmoid of `2 y`.
const TANH_SLOPE: f64 = 1.595_769_121_605_730_7;
/// Factor of the cube in it.
const TANH_CUBE: f64 = 0.044715;

fn times<B: Backend>(x: FloatTensor<B>, factor: f64) -> FloatTensor<B> {
    B::float_mul_scalar(x, Scalar::from(factor))
}

fn plus<B: Backend>(x: FloatTensor<B>, term: f64) -> FloatTensor<B> {
    B::float_add_scalar(x, Scalar::from(term))
}

/// `1 − x`
fn rest<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    plus::<B>(B::float_neg(x), 1.0)
}

/// `1 / (1 + exp(−x))`, of numbers whose exponential is finite.
fn sigmoid<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let most = match x.dtype() {
        DType::F64 => 700.0,
        _ => 88.0,
    };
    let near = B::float_clamp(x, Scalar::from(-most), Scalar::from(most));
    let exponential = B::float_exp(B::float_neg(near));
    B::float_recip(plus::<B>(exponential, 1.0))
}

/// `1 + erf(x / √2)`
fn one_and_erf<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    plus::<B>(
        B::float_erf(times::<B>(x, std::f64::consts::FRAC_1_SQRT_2)),
        1.0,
    )
}

fn value<B: Backend>(x: FloatTensor<B>, activation: Activation) -> FloatTensor<B> {
    match activation {
        Activation::None => x,
        Activation::GeluSigmoid => B::float_mul(x.clone(), sigmoid::<B>(times::<B>(x, GELU_SLOPE))),
        Activation::GeluTanh => {
            let square = B::float_mul(x.clone(), x.clone());
            let inner = plus::<B>(times::<B>(square, TANH_CUBE), 1.0);
            let inner = B::float_mul(times::<B>(x.clone(), TANH_SLOPE), inner);
            B::float_mul(x, sigmoid::<B>(inner))
        }
        Activation::GeluErf => B::float_mul(times::<B>(x.clone(), 0.5), one_and_erf::<B>(x)),
        Activation::Relu => B::float_clamp_min(x, Scalar::from(0.0)),
        Activation::Silu => B::float_mul(x.clone(), sigmoid::<B>(x)),
    }
}

/// `s (1 + x (1 − s))`
fn swish_slope<B: Backend>(s: FloatTensor<B>, x: FloatTensor<B>) -> FloatTensor<B> {
    let inner = plus::<B>(B::float_mul(x, rest::<B>(s.clone())), 1.0);
    B::float_mul(s, inner)
}

/// `grad` times the derivative at x.
fn by_x<B: Backend>(
    grad: FloatTensor<B>,
    x: FloatTensor<B>,
    activation: Activation,
) -> FloatTensor<B> {
    let slope = match activation {
        Activation::None => return grad,
        Activation::GeluSigmoid => {
            let scaled = times::<B>(x, GELU_SLOPE);
            swish_slope::<B>(sigmoid::<B>(scaled.clone()), scaled)
        }
        Activation::GeluTanh => {
            // Beyond ±30 it is 0 or 1 in every type, and the cube would overflow.
            let x = B::float_clamp(x, Scalar::from(-30.0), Scalar::from(30.0));
            let square = times::<B>(B::float_mul(x.clone(), x.clone()), TANH_CUBE);
            let scaled = times::<B>(x, TANH_SLOPE);
            let inner = B::float_mul(scaled.clone(), plus::<B>(square.clone(), 1.0));
            let by_inner = B::float_mul(scaled, plus::<B>(times::<B>(square, 3.0), 1.0));
            swish_slope::<B>(sigmoid::<B>(inner), by_inner)
        }
        Activation::GeluErf => {
            // Beyond ±30 the density is 0 in every type, and squares would overflow.
            let near = B::float_clamp(x.clone(), Scalar::from(-30.0), Scalar::from(30.0));
            let square = B::float_mul(near.clone(), near.clone());
            let density = times::<B>(
                B::float_exp(times::<B>(square, -0.5)),
                (2.0 * std::f64::consts::PI).sqrt().recip(),
            );
            let half = times::<B>(one_and_erf::<B>(x), 0.5);
            B::float_add(half, B::float_mul(near, density))
        }
        Activation::Relu => {
            // 1 where x is positive, 0 elsewhere.
            B::float_sign(B::float_clamp_min(x, Scalar::from(0.0)))
        }
        Activation::Silu => swish_slope::<B>(sigmoid::<B>(x.clone()), x),
    };
    B::float_mul(grad, slope)
}

/// `x + bias` in the dtype of sums.
fn biased<B: Backend>(x: FloatTensor<B>, bias: Option<FloatTensor<B>>) -> FloatTensor<B> {
    let sums = accumulate_in(x.dtype().into());
    let shape = x.shape();
    let x = B::float_cast(x, sums);
    match bias {
        None => x,
        Some(bias) => {
            let mut spread = vec![1; shape.num_dims()];
            spread[shape.num_dims() - 1] = bias.shape()[0];
            let bias = B::float_reshape(B::float_cast(bias, sums), Shape::from(spread));
            B::float_add(x, bias)
        }
    }
}

pub(crate) fn forward<B: Backend>(inputs: BiasedRows<B>, activation: Activation) -> FloatTensor<B> {
    let dtype = FloatDType::from(inputs.x.dtype());
    let x = biased::<B>(inputs.x, inputs.bias.into_option());
    B::float_cast(value::<B>(x, activation), dtype)
}

pub(crate) fn backward<B: Backend>(
    saved: ActivationSaved<B>,
    activation: Activation,
    task: ActivationTask,
) -> ActivationGrads<B> {
    let ActivationSaved { x, bias, grad } = saved;
    let dtype = FloatDType::from(grad.dtype());
    let shape = grad.shape();
    let width = shape[shape.num_dims() - 1];
    let rows = shape.iter().rev().skip(1).product();
    let grad = B::float_cast(grad, accumulate_in(dtype));
    let x = (x.into_option()).map(|x| biased::<B>(x, bias.into_option()));
    let y = (x.clone().filter(|_| task.y)).map(|x| B::float_cast(value::<B>(x, activation), dtype));
    let grad = match x {
        Some(x) => by_x::<B>(grad, x, activation),
        None => grad,
    };
    let bias = task.bias.map(|dtype| {
        let matrix = B::float_reshape(grad.clone(), Shape::new([rows, width]));
        let sums = B::float_reshape(B::float_sum_dim(matrix, 0), Shape::new([width]));
        B::float_cast(sums, dtype)
    });
    ActivationGrads {
        x: task.x.then(|| B::float_cast(grad, dtype)).into(),
        bias: bias.into(),
        y: y.into(),
    }
}
