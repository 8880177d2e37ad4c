//! A bias and an activation against f64 loops.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use burn_fused_ops::{Activation, bias_activation};

use crate::prelude::*;
use crate::training::results::*;

/// Names of a call's results, in the order of [`Problem::solve`] and [`Problem::run`].
const NAMES: [&str; 3] = ["y", "dx", "dbias"];

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

/// `x · sigmoid(s x)` and its derivative.
fn swish(x: f64, s: f64) -> [f64; 2] {
    let at = sigmoid(s * x);
    [x * at, at + s * x * at * (1.0 - at)]
}

/// `f(x)` and `f'(x)`.
fn value_and_slope(x: f64, activation: Activation) -> [f64; 2] {
    match activation {
        Activation::None => [x, 1.0],
        Activation::GeluSigmoid => swish(x, 1.702),
        Activation::GeluTanh => {
            let factor = (2.0 / PI).sqrt();
            let tanh = (factor * (x + 0.044715 * x.powi(3))).tanh();
            let inner = factor * (1.0 + 3.0 * 0.044715 * x * x);
            // Where the cosine is infinite, its reciprocal is 0.
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

/// A call, with numbers in f64.
#[derive(Clone, Debug)]
struct Problem {
    shape: Vec<usize>,
    activation: Activation,
    x: Vec<f64>,
    bias: Option<Vec<f64>>,
    grad: Vec<f64>,
}

impl Problem {
    fn new(shape: &[usize], activation: Activation, bias: bool) -> Self {
        let count: usize = shape.iter().product();
        let width = shape[shape.len() - 1];
        let scaled: Vec<f64> = numbers(21, count).iter().map(|x| 4.0 * x).collect();
        Self {
            shape: shape.to_vec(),
            activation,
            x: scaled,
            bias: bias.then(|| numbers(22, width)),
            grad: numbers(23, count),
        }
    }

    fn rounded(mut self, [x, bias]: [DType; 2]) -> Self {
        round_to(&mut self.x, x);
        round_to(&mut self.grad, x);
        if let Some(values) = &mut self.bias {
            round_to(values, bias);
        }
        self
    }

    fn solve(&self) -> Judged<3> {
        let width = self.shape[self.shape.len() - 1];
        let (mut y, mut dx) = (Vec::new(), Vec::new());
        let mut by_bias = vec![0.0; width];
        for (at, (x, grad)) in self.x.iter().zip(&self.grad).enumerate() {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[at % width]);
            let [value, slope] = value_and_slope(x + bias, self.activation);
            y.push(value);
            dx.push(grad * slope);
            by_bias[at % width] += grad * slope;
        }
        [Some(y), Some(dx), self.bias.as_ref().map(|_| by_bias)]
    }

    /// The same of the op, for dtypes of x and of the bias.
    fn run(&self, device: &Device, dtypes: [DType; 2], tracked: [bool; 2]) -> Given<3> {
        match self.shape.len() {
            1 => self.run_of::<1>(device, dtypes, tracked),
            2 => self.run_of::<2>(device, dtypes, tracked),
            3 => self.run_of::<3>(device, dtypes, tracked),
            4 => self.run_of::<4>(device, dtypes, tracked),
            rank => panic!("rank {rank}"),
        }
    }

    fn run_of<const D: usize>(
        &self,
        device: &Device,
        [dtype, bias_dtype]: [DType; 2],
        tracked: [bool; 2],
    ) -> Given<3> {
        let shape: [usize; D] = self.shape.clone().try_into().unwrap();
        let x = tensor(&self.x, shape, device, dtype).set_require_grad(tracked[0]);
        let bias = self.bias.as_ref().map(|values| {
            tensor(values, [values.len()], device, bias_dtype).set_require_grad(tracked[1])
        });
        let y = bias_activation(x.clone(), bias.clone(), self.activation).unwrap();
        assert_eq!((y.dims(), y.dtype()), (shape, dtype));
        let grad = tensor(&self.grad, shape, device, dtype);
        let grads = (y.clone() * grad).sum().backward();
        let by_bias = bias.and_then(|bias| gradient(&bias, &grads));
        let by_x = gradient(&x, &grads);
        [Some(y.inner().into_data()), by_x, by_bias]
    }

    fn check(&self, what: &str, device: &Device, dtypes: [DType; 2], tolerance: f64) {
        let got = self.run(&device.clone().autodiff(), dtypes, [true; 2]);
        let (shape, activation) = (&self.shape, self.activation);
        let what = format!("{what}, {device:?}, {dtypes:?}, {shape:?}, {activation:?}");
        let of = [dtypes[0], dtypes[0], dtypes[1]];
        assert_results(&what, &NAMES, got, self.solve(), |index| {
            (of[index], tolerance)
        });
    }
}

/// Shapes with rows and widths of all kinds and of each rank, empty ones too.
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
    // Steps that a cube makes along the rows.
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
            let problem = Problem::new(shape, activation, bias);
            for (device, dtype, tolerance) in exact(devices) {
                problem.check("f64", device, [dtype; 2], tolerance);
            }
        }
    }
}

/// Half precision, and a bias of another dtype than x, within the rounding of what is rounded.
pub fn bias_activation_in_half_precision(devices: &[Device]) {
    for device in devices {
        for half in half_dtypes(device) {
            for (index, activation) in Activation::ALL.into_iter().enumerate() {
                for dtypes in [[half; 2], [half, DType::F32], [DType::F32, half]] {
                    let shape: &[usize] = [&[40, 33][..], &[2, 20, 136]][index % 2];
                    let problem = Problem::new(shape, activation, true).rounded(dtypes);
                    problem.check("half", device, dtypes, unit(half));
                }
                let problem = Problem::new(&[7, 3], activation, false).rounded([half; 2]);
                problem.check("half", device, [half; 2], unit(half));
            }
        }
        if supports(device, DType::F64) {
            for dtypes in [[DType::F64, DType::F32], [DType::F32, DType::F64]] {
                let problem = Problem::new(&[30, 36], Activation::GeluTanh, true);
                problem.rounded(dtypes).check("mixed", device, dtypes, 1e-5);
            }
        }
    }
}

/// Far from 0 each activation is 0 or the number itself: nothing is infinite that is not in f64.
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
            let mut problem = Problem::new(&[x.len(), 1], activation, true);
            problem.x = x.clone();
            problem.bias = Some(vec![0.0]);
            problem.grad = vec![1.0; x.len()];
            let problem = problem.rounded([dtype; 2]);
            let got = problem.run(&device.clone().autodiff(), [dtype; 2], [true; 2]);
            for ((got, expected), name) in got.into_iter().zip(problem.solve()).zip(NAMES) {
                let (got, expected) = (to_f64(got.unwrap()), expected.unwrap());
                assert_eq!(got.len(), expected.len());
                for (at, (got, expected)) in got.into_iter().zip(expected).enumerate() {
                    let what = format!("{device:?}, {dtype:?}, {activation:?}: {name}, {at}");
                    let within = tolerance * expected.abs().max(1.0);
                    assert_near(&what, &[got], &[expected], within);
                }
            }
        }
    }
}

/// The same bits twice, whatever the strides of x and of the gradient, and with gradient checkpointing through steps that it computes again.
pub fn bias_activation_gives_the_same_bits(devices: &[Device]) {
    for plain in devices {
        for activation in Activation::ALL {
            let problem = Problem::new(&[60, 50, 24], activation, true);
            let device = plain.clone().autodiff();
            let run = || bits(&problem.run(&device, [DType::F32; 2], [true; 2]));
            let first = run();
            assert_eq!(first, run(), "{plain:?}, {activation:?}");
            for device in tracked(plain) {
                let shape = [60, 50, 24];
                let leaf = tensor(&problem.x, shape, &device, DType::F32).require_grad();
                let values = problem.bias.as_ref().unwrap();
                let bias = tensor(values, [24], &device, DType::F32).require_grad();
                let stored = (leaf.clone() * 2.0).swap_dims(0, 2).reshape([24, 50, 60]);
                let x = stored.swap_dims(0, 2) * 0.5;
                let y = bias_activation(x, Some(bias.clone() * 2.0 * 0.5), activation).unwrap();
                let grad = tensor(&problem.grad, shape, &device, DType::F32).swap_dims(0, 1);
                let grads = (y.clone().swap_dims(0, 1) * grad).sum().backward();
                let y = Some(y.inner().into_data());
                let again = [y, gradient(&leaf, &grads), gradient(&bias, &grads)];
                assert_eq!(first, bits(&again), "{device:?}, {activation:?}");
            }
            // A transposed view, that nothing has copied before.
            let device = plain.clone().autodiff();
            let x = tensor(&problem.x, [60, 50, 24], &device, DType::F32);
            let x = stored_swapped(&x, 0, 2);
            let values = problem.bias.as_ref().unwrap();
            let bias = tensor(values, [24], &device, DType::F32);
            let y = bias_activation(x, Some(bias), activation).unwrap();
            assert_eq!(first[..1], bits(&[Some(y.into_data())]), "{device:?}");
        }
    }
}

/// Inputs that are used again behind the call are as they were, though the result may take x's place.
pub fn bias_activation_keeps_its_inputs(devices: &[Device]) {
    for plain in devices {
        for device in [plain.clone(), plain.clone().autodiff()] {
            let values = numbers(31, 7 * 12);
            let x = tensor(&values, [7, 12], &device, DType::F32);
            let bias = tensor(&numbers(32, 12), [12], &device, DType::F32);
            let before = read(x.clone());
            let view = x.clone().slice([2..5, 0..12]);
            let part = read(view.clone());
            let once = bias_activation(x.clone(), Some(bias.clone()), Activation::Silu).unwrap();
            let once = once.into_data();
            let _ = bias_activation(view, Some(bias.clone()), Activation::Silu).unwrap();
            x.clone().into_data().assert_eq(&before, true);
            x.clone()
                .slice([2..5, 0..12])
                .into_data()
                .assert_eq(&part, true);
            // The last use.
            let twice = bias_activation(x, Some(bias), Activation::Silu).unwrap();
            twice.into_data().assert_eq(&once, true);
        }
    }
}

/// What is frozen gets no gradient, and changes no other.
pub fn bias_activation_constants(devices: &[Device]) {
    let mut ran = 0;
    for plain in devices {
        let device = plain.clone().autodiff();
        for activation in Activation::ALL {
            let problem = Problem::new(&[2, 9, 10], activation, true);
            let all = problem.run(&device, [DType::F32; 2], [true; 2]);
            for tracked in [[false, true], [true, false]] {
                let some = problem.run(&device, [DType::F32; 2], tracked);
                let what = format!("{plain:?}, {activation:?}, {tracked:?}");
                assert_wanted(&what, &some, &all, [true, tracked[0], tracked[1]]);
                ran += 1;
            }
        }
        // Nothing tracked: nothing to be differentiated.
        let x = tensor(&numbers(1, 12), [3, 4], &device, DType::F32);
        let y = bias_activation(x, None, Activation::Relu).unwrap();
        assert!(!y.is_require_grad());
        let x = tensor(&numbers(1, 12), [3, 4], plain, DType::F32);
        let y = bias_activation(x, None, Activation::Relu).unwrap();
        assert!(!y.device().is_autodiff());
    }
    assert_ran("bias_activation_constants", ran);
}

/// What will run is said before, in words.
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
