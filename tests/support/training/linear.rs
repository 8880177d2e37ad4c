//! Products with weights and their gradients, against f64.

use burn::tensor::FloatDType;
use burn_fused_ops::{LinearOptions, fused_linear, linear};

use crate::prelude::*;

struct Problem {
    batch: usize,
    rows: usize,
    width: usize,
    outs: Vec<usize>,
    x: Vec<f64>,
    weights: Vec<Vec<f64>>,
    grad: Vec<f64>,
}

/// Columns `[start, start + width)` of a matrix of `all` columns.
fn columns(matrix: &[f64], all: usize, start: usize, width: usize) -> Vec<f64> {
    matrix
        .chunks(all.max(1))
        .flat_map(|row| row[start..start + width].to_vec())
        .collect()
}

impl Problem {
    fn new([batch, rows, width]: [usize; 3], outs: &[usize]) -> Self {
        let all: usize = outs.iter().sum();
        Self {
            batch,
            rows,
            width,
            outs: outs.to_vec(),
            x: numbers(1, batch * rows * width),
            weights: (outs.iter().enumerate())
                .map(|(index, out)| numbers(2 + index as u64, width * out))
                .collect(),
            grad: numbers(9, batch * rows * all),
        }
    }

    fn round_to(&mut self, dtype: DType) {
        let factors = [&mut self.x, &mut self.grad].into_iter();
        for values in factors.chain(&mut self.weights) {
            round_to(values, dtype);
        }
    }

    fn out(&self) -> usize {
        self.outs.iter().sum()
    }

    /// y, dx and each dW.
    fn expected(&self) -> Vec<Vec<f64>> {
        let (rows, width) = (self.batch * self.rows, self.width);
        let x = &self.x;
        let mut y = vec![0.0; rows * self.out()];
        let mut dx = vec![0.0; rows * width];
        let mut by_weights = Vec::new();
        let mut start = 0;
        for (weight, &out) in self.weights.iter().zip(&self.outs) {
            let grad = columns(&self.grad, self.out(), start, out);
            let part = product(
                [rows, width, out],
                |r, k| x[r * width + k],
                |k, c| weight[k * out + c],
            );
            for row in 0..rows {
                y[row * self.out() + start..][..out].copy_from_slice(&part[row * out..][..out]);
            }
            let part = product(
                [rows, out, width],
                |r, k| grad[r * out + k],
                |k, c| weight[c * out + k],
            );
            dx.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            by_weights.push(product(
                [width, rows, out],
                |i, r| x[r * width + i],
                |r, c| grad[r * out + c],
            ));
            start += out;
        }
        [y, dx].into_iter().chain(by_weights).collect()
    }

    /// The same of the op, for tensors of `dtypes`: x's and the weights'.
    fn run(
        &self,
        device: &Device,
        [dtype, weight_dtype]: [DType; 2],
        options: &LinearOptions,
    ) -> Vec<TensorData> {
        let shape = [self.batch, self.rows, self.width];
        let x = tensor(&self.x, shape, device, dtype).require_grad();
        let weights: Vec<Tensor<2>> = (self.weights.iter().zip(&self.outs))
            .map(|(weight, out)| tensor(weight, [self.width, *out], device, weight_dtype))
            .map(Tensor::require_grad)
            .collect();
        let y = fused_linear(x.clone(), weights.clone(), options).unwrap();
        let shape = [self.batch, self.rows, self.out()];
        assert_eq!(y.dims(), shape);
        let expected = options.dtype.map_or(dtype, DType::from);
        assert_eq!(y.dtype(), expected);
        let grad = tensor(&self.grad, shape, device, expected);
        let grads = (y.clone() * grad).sum().backward();
        let x_grad = x.grad(&grads).unwrap();
        assert_eq!(x_grad.dtype(), dtype);
        let by_weights = weights.iter().map(|weight| {
            let grad = weight.grad(&grads).unwrap();
            assert_eq!(grad.dtype(), weight_dtype);
            grad.into_data()
        });
        [y.into_data(), x_grad.into_data()]
            .into_iter()
            .chain(by_weights)
            .collect()
    }

    fn check(&self, what: &str, got: Vec<TensorData>, tolerances: &[f64]) {
        let expected = self.expected();
        assert_eq!(got.len(), expected.len());
        let names = ["y", "dx", "dW1", "dW2", "dW3"];
        for (index, (got, expected)) in got.into_iter().zip(expected).enumerate() {
            let shape = [self.batch, self.rows, self.width];
            let what = format!("{what}, {shape:?} to {:?}: {}", self.outs, names[index]);
            assert_close(&what, got, &expected, tolerances[index.min(2)]);
        }
    }
}

fn problems() -> Vec<Problem> {
    vec![
        Problem::new([1, 1, 1], &[1]),
        Problem::new([3, 100, 130], &[33, 1, 20]),
        Problem::new([1, 300, 512], &[8]),
        Problem::new([1, 5000, 33], &[12]),
        // The rows of a weight's gradient in groups.
        Problem::new([4, 1024, 20], &[13, 4]),
        Problem::new([2, 0, 5], &[3, 2]),
        Problem::new([1, 30, 6], &[4, 0, 3]),
        Problem::new([1, 200, 64], &[128, 64, 8]),
    ]
}

/// One to three weights, rows in groups and not, no rows.
pub fn products_equal_f64(devices: &[Device]) {
    for problem in problems() {
        for (device, dtype, tolerance) in exact(devices) {
            let tolerance = product_tolerance(device, dtype, tolerance);
            for tracked in tracked(device) {
                let options = LinearOptions::default();
                let run = || problem.run(&tracked, [dtype; 2], &options);
                let got = run();
                assert_eq!(got, run(), "the same bits twice");
                problem.check(&format!("{device:?}, {dtype:?}"), got, &[tolerance; 3]);
            }
        }
    }
}

/// Factors are rounded, sums are not: weights' gradients are f32, and x's if x is.
pub fn products_in_half_precision(devices: &[Device]) {
    let some = [
        Problem::new([1, 30, 6], &[4, 3, 5]),
        Problem::new([4, 1024, 20], &[13]),
        // Multiples of 8, which wgmma multiplies: several tiles with ragged ends, and a long sum.
        Problem::new([2, 150, 136], &[72, 264, 8]),
        Problem::new([4, 1024, 24], &[16]),
    ];
    for mut problem in some {
        for (device, half) in halves(devices) {
            let rounding = if half == DType::BF16 { 4e-3 } else { 5e-4 };
            let options = LinearOptions::default().dtype(FloatDType::from(half));
            problem.round_to(half);
            let device = device.clone().autodiff();
            let what = format!("{device:?}, {half:?}");
            let got = problem.run(&device, [DType::F32; 2], &options);
            problem.check(&what, got, &[rounding, 1e-5, 1e-5]);
            let options = LinearOptions::default();
            let got = problem.run(&device, [half, DType::F32], &options);
            problem.check(&what, got, &[rounding, rounding, 1e-5]);
            let got = problem.run(&device, [half; 2], &options);
            problem.check(&what, got, &[rounding; 3]);
        }
    }
}

/// The same numbers whatever the strides of the inputs.
pub fn products_of_any_strides(devices: &[Device]) {
    for device in devices {
        let device = &device.clone().autodiff();
        let x = tensor(&numbers(1, 40 * 33), [40, 33], device, DType::F32);
        let weight = tensor(&numbers(2, 33 * 20), [33, 20], device, DType::F32);
        let other = |tensor: &Tensor<2>| stored_swapped(tensor, 0, 1);

        let run = |x: Tensor<2>, weight: Tensor<2>| {
            let (x, weight) = (x.require_grad(), weight.require_grad());
            let options = LinearOptions::default();
            let y = linear(x.clone(), weight.clone(), &options).unwrap();
            // A gradient that is a transposed view.
            let seed = tensor(&numbers(3, 40 * 20), [20, 40], device, DType::F32);
            let grads = (y.clone().transpose() * seed).sum().backward();
            [y, x.grad(&grads).unwrap(), weight.grad(&grads).unwrap()].map(Tensor::into_data)
        };
        let plain = run(x.clone(), weight.clone());
        for (x, weight) in [(other(&x), other(&weight)), (other(&x), weight.clone())] {
            for (got, expected) in run(x, weight).into_iter().zip(&plain) {
                let tolerance = product_tolerance(device, DType::F32, 1e-6);
                assert_close("strides", got, &to_f64(expected.clone()), tolerance);
            }
        }
    }
}

/// Frozen weights and constant inputs get no gradient and do not disturb the others'.
pub fn products_differentiate_what_is_tracked(devices: &[Device]) {
    let problem = Problem::new([1, 30, 6], &[4, 3, 5]);
    let expected = problem.expected();
    for plain in devices {
        let device = &plain.clone().autodiff();
        let tolerance = product_tolerance(plain, DType::F32, 1e-5);
        let run = |tracked: [bool; 4]| {
            let leaf = |values: &[f64], shape: [usize; 2], tracked: bool| {
                tensor(values, shape, device, DType::F32).set_require_grad(tracked)
            };
            let x = leaf(&problem.x, [30, 6], tracked[0]);
            let weights: Vec<Tensor<2>> = (0..3)
                .map(|index| {
                    let shape = [6, problem.outs[index]];
                    leaf(&problem.weights[index], shape, tracked[index + 1])
                })
                .collect();
            let y = fused_linear(x.clone(), weights.clone(), &LinearOptions::default()).unwrap();
            let grad = tensor(&problem.grad, [30, 12], device, DType::F32);
            let grads = (y * grad).sum().backward();
            for (index, leaf) in [x].iter().chain(&weights).enumerate() {
                let grad = leaf.grad(&grads);
                assert_eq!(grad.is_some(), tracked[index], "{tracked:?}, input {index}");
                if let Some(grad) = grad {
                    let expected = &expected[index + 1];
                    assert_close("tracked", grad.into_data(), expected, tolerance);
                }
            }
        };
        run([true, false, false, false]);
        run([false, true, true, true]);
        run([false, false, true, false]);
        run([true, true, false, true]);
        // Nothing tracked: plain in, plain out.
        let x = tensor(&problem.x, [30, 6], plain, DType::F32);
        let weight = tensor(&problem.weights[0], [6, 4], plain, DType::F32);
        let y = linear(x, weight, &LinearOptions::default()).unwrap();
        assert!(!y.device().is_autodiff());
    }
}
