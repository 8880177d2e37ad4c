//! A bias and an activation against f64 loops.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use burn_fused_ops::{Activation, bias_activation};

use crate::prelude::*;
use crate::training::case::*;

/// The error function: `2/√π exp(−x²) Σ 2ⁿ x²ⁿ⁺¹ / (2n+1)!!`, whose terms have one sign.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let mut term = x;
    let mut sum = x;
    for n in 1..200 {
        term *= 2.0 * x * x / (2 * n + 1) as f64;
        sum += term;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns `x · sigmoid(s x)` and its derivative.
fn swish(x: f64, s: f64) -> [f64; 2] {
    let at = sigmoid(s * x);
    [x * at, at + s * x * at * (1.0 - at)]
}

/// Returns `f(x)` and `f'(x)`.
pub fn value_and_slope(x: f64, activation: Activation) -> [f64; 2] {
    match activation {
        Activation::None => [x, 1.0],
        Activation::GeluSigmoid => swish(x, 1.702),
        Activation::GeluTanh => {
            let factor = (2.0 / PI).sqrt();
            let tanh = (factor * (x + 0.044715 * x.powi(3))).tanh();
            let inner = factor * (1.0 + 3.0 * 0.044715 * x * x);
            // 1 − tanh² instead of the reciprocal of cosh², which may overflow.
            let by_inner = 1.0 - tanh * tanh;
            let slope = 0.5 * (1.0 + tanh) + 0.5 * x * by_inner * inner;
            [0.5 * x * (1.0 + tanh), slope]
        }
        Activation::GeluErf => {
            let part = 0.5 * (1.0 + erf(x * FRAC_1_SQRT_2));
            let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
            [x * part, part + x * density]
        }
        Activation::Relu => [x.max(0.0), f64::from(u8::from(x > 0.0))],
        Activation::Silu => swish(x, 1.0),
        other => panic!("{other:?} has no f64 definition"),
    }
}

/// Makes a call with tensors of any rank.
fn case(shape: &[usize], activation: Activation, bias: bool) -> Case<'_> {
    let count: usize = shape.iter().product();
    let width = shape[shape.len() - 1];
    let scaled = numbers(21, count).iter().map(|x| 4.0 * x).collect();
    case_of(shape, activation, scaled, bias.then(|| numbers(22, width))).result("y", 0, shape, 23)
}

/// Makes a call from values of x and a bias, without a result.
fn case_of(
    shape: &[usize],
    activation: Activation,
    x: Vec<f64>,
    bias: Option<Vec<f64>>,
) -> Case<'_> {
    fn made<const D: usize>(x: &mut Tensors, bias: bool, activation: Activation) -> Vec<Made> {
        let (x, bias) = (x.take::<D>(), bias.then(|| x.take()));
        vec![bias_activation(x, bias, activation).unwrap().into()]
    }
    let (width, has_bias) = (shape[shape.len() - 1], bias.is_some());
    let call = move |x: &mut Tensors| match shape.len() {
        1 => made::<1>(x, has_bias, activation),
        2 => made::<2>(x, has_bias, activation),
        3 => made::<3>(x, has_bias, activation),
        _ => made::<4>(x, has_bias, activation),
    };
    let judge = move |x: &[Vec<f64>], grads: &[Vec<f64>]| {
        let (mut y, mut dx) = (Vec::new(), Vec::new());
        let mut by_bias = vec![0.0; width];
        for (at, (value, grad)) in x[0].iter().zip(&grads[0]).enumerate() {
            let bias = x.get(1).map_or(0.0, |bias| bias[at % width]);
            let [value, slope] = value_and_slope(value + bias, activation);
            y.push(value);
            dx.push(grad * slope);
            by_bias[at % width] += grad * slope;
        }
        let mut all = vec![y, dx, by_bias];
        all.truncate(1 + x.len());
        all
    };
    let case = Case::new(format!("{shape:?}, {activation:?}"), call, judge);
    let case = case.input("x", 0, shape, x);
    case.input_if(has_bias, "bias", 1, &[width], bias.unwrap_or_default())
}

/// Shapes of each rank with many numbers of rows and widths, including empty ones.
const SHAPES: [&[usize]; 17] = [
    &[1, 1],
    &[7, 3],
    &[3, 100, 33],
    &[7, 130],
    &[1, 2, 3, 512],
    &[5000, 12],
    &[7, 1000],
    &[5, 1000, 1],
    &[2, 3, 50, 33],
    &[1000],
    &[300, 130],
    &[2, 1, 1000],
    &[0, 6],
    &[2, 0, 5],
    &[4, 0],
    &[0, 5, 64],
    // Several steps of a cube along the rows.
    &[2200, 1001],
];

/// The result and both gradients: each activation, with and without a bias.
pub fn bias_activation_equals_f64(devices: &[Device]) {
    let all = Activation::ALL;
    let with = |bias: bool| all.into_iter().map(move |activation| (activation, bias));
    for (index, shape) in SHAPES.into_iter().enumerate() {
        let calls: Vec<(Activation, bool)> = match index {
            2 | 3 => with(false).chain(with(true)).collect(),
            // The large one.
            16 => vec![(Activation::Silu, true)],
            _ => vec![
                (all[index % 6], true),
                (all[(index + 1) % 6], index % 3 == 0),
            ],
        };
        for (activation, bias) in calls {
            let case = case(shape, activation, bias);
            for (device, dtype, tolerance) in exact(devices) {
                case.check_in(device, dtype, tolerance);
            }
        }
    }
}

/// Half precision, and a bias of another dtype than x, within the rounding of the rounded ones.
pub fn bias_activation_in_half_precision(devices: &[Device]) {
    for (device, half) in halves(devices) {
        for (index, activation) in Activation::ALL.into_iter().enumerate() {
            for dtypes in [[half; 2], [half, DType::F32], [DType::F32, half]] {
                let shape: &[usize] = [&[40, 33][..], &[2, 20, 136]][index % 2];
                case(shape, activation, true).check(device, &dtypes, |_| unit(half));
            }
            case(&[7, 3], activation, false).check_in(device, half, unit(half));
        }
    }
    for device in with(devices, DType::F64) {
        for dtypes in [[DType::F64, DType::F32], [DType::F32, DType::F64]] {
            case(&[30, 36], Activation::GeluTanh, true).check(device, &dtypes, |_| 1e-5);
        }
    }
}

/// Far from 0 each activation is 0 or the input: nothing overflows that is finite in f64.
pub fn bias_activation_of_large_values(devices: &[Device]) {
    const LARGE: [f64; 12] = [
        0.0, -0.0, 5.5, 20.0, 30.0, 87.0, 89.0, 104.0, 710.0, 1e4, 65_504.0, 1e-6,
    ];
    let halves = halves(devices).map(|(device, half)| (device, half, unit(half)));
    for (device, dtype, tolerance) in exact(devices).chain(halves) {
        let mut x: Vec<f64> = LARGE.iter().flat_map(|x| [*x, -x]).collect();
        if dtype != DType::F16 {
            x.extend([1e12, -1e12, 1e20, -1e20, 1e30, -1e30]);
        }
        for activation in Activation::ALL {
            let shape = [x.len(), 1];
            let case = case_of(&shape, activation, x.clone(), Some(vec![0.0]));
            let case = case.result("y", 0, &shape, vec![1.0; x.len()]);
            for (what, got, expected) in case.compared(device, &[dtype; 2]) {
                let got = to_f64(got);
                assert_eq!(got.len(), expected.len());
                for (at, (got, expected)) in got.into_iter().zip(expected).enumerate() {
                    let within = tolerance * expected.abs().max(1.0);
                    assert_near(&format!("{what}, {at}"), &[got], &[expected], within);
                }
            }
        }
    }
}

/// Equal bits whatever the strides, and frozen inputs.
pub fn bias_activation_bits_and_constants(devices: &[Device]) {
    for activation in Activation::ALL {
        case(&[60, 50, 24], activation, true).gives_the_same_bits(devices, 0.0);
        case(&[2, 9, 10], activation, true).has_constants(devices, 0.0);
    }
}

/// Other views of a tensor are unchanged, although the result may overwrite it.
pub fn bias_activation_of_slices(devices: &[Device]) {
    for plain in devices {
        for device in [plain.clone(), plain.clone().autodiff()] {
            let x = tensor(&numbers(31, 7 * 12), [7, 12], &device, DType::F32);
            let bias = tensor(&numbers(32, 12), [12], &device, DType::F32);
            let (before, view) = (read(x.clone()), x.clone().slice([2..5, 0..12]));
            let part = read(view.clone());
            let _ = bias_activation(view, Some(bias), Activation::Silu).unwrap();
            read(x.clone()).assert_eq(&before, true);
            read(x.slice([2..5, 0..12])).assert_eq(&part, true);
        }
    }
}

/// Plans describe in words what will run.
pub fn bias_activation_plans(devices: &[Device]) {
    for device in devices {
        let x = Tensor::<2>::zeros([300, 512], device);
        let bias = Tensor::<1>::zeros([512], device);
        for activation in Activation::ALL {
            let plan = activation.explain(&x, Some(&bias)).unwrap();
            assert_plan(&plan, device);
        }
    }
}
