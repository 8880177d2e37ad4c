//! Feed-forward networks against the three operations that they are made of, each of which is compared with f64 by itself.

use burn::tensor::FloatDType;
use burn_fused_ops::{
    Activation, LinearOptions, MlpOptions, MlpParams, bias_activation, linear, mlp,
};

use crate::prelude::*;
use crate::training::results::*;

/// Which of x, the weights and the bias are differentiated by.
type Tracked = [bool; 4];

#[derive(Clone, Debug)]
struct Problem {
    rows: usize,
    /// in, hidden, out.
    widths: [usize; 3],
    activation: Activation,
    bias: bool,
}

/// The result and the gradients by x, the inner weight, the outer weight and the bias.
type All = Given<5>;

impl Problem {
    fn new(rows: usize, widths: [usize; 3], activation: Activation, bias: bool) -> Self {
        Self {
            rows,
            widths,
            activation,
            bias,
        }
    }

    /// By the op with options, or by its three parts.
    fn run(
        &self,
        device: &Device,
        dtypes: [DType; 2],
        product: Option<FloatDType>,
        tracked: Tracked,
        op: Option<bool>,
    ) -> All {
        let [width, hidden, out] = self.widths;
        let leaf = |seed: u64, shape: [usize; 2], dtype: DType, tracked: bool| {
            let values = numbers(seed, shape[0] * shape[1]);
            tensor(&values, shape, device, dtype).set_require_grad(tracked)
        };
        let x = leaf(41, [self.rows, width], dtypes[0], tracked[0]);
        let inner = leaf(42, [width, hidden], dtypes[1], tracked[1]);
        let outer = leaf(43, [hidden, out], dtypes[1], tracked[2]);
        let bias = self.bias.then(|| {
            let values = numbers(44, hidden);
            tensor(&values, [hidden], device, dtypes[1]).set_require_grad(tracked[3])
        });
        let y = match op {
            Some(recompute) => {
                let mut params = MlpParams::new(inner.clone(), outer.clone());
                params.bias = bias.clone();
                let mut options = MlpOptions::default().recompute(recompute);
                options.dtype = product;
                mlp(x.clone(), params, self.activation, &options).unwrap()
            }
            None => {
                let mut options = LinearOptions::default();
                options.dtype = product;
                let between = linear(x.clone(), inner.clone(), &options).unwrap();
                let between = bias_activation(between, bias.clone(), self.activation).unwrap();
                linear(between, outer.clone(), &options).unwrap()
            }
        };
        assert_eq!(y.dims(), [self.rows, out]);
        let dtype = product.map_or(dtypes[0], DType::from);
        assert_eq!(y.dtype(), dtype);
        let mut grads = [const { None }; 4];
        if tracked.contains(&true) {
            let seed = tensor(
                &numbers(45, self.rows * out),
                [self.rows, out],
                device,
                dtype,
            );
            let all = (y.clone() * seed).sum().backward();
            let by_bias = bias.and_then(|bias| gradient(&bias, &all));
            let [by_inner, by_outer] = [&inner, &outer].map(|weight| gradient(weight, &all));
            grads = [gradient(&x, &all), by_inner, by_outer, by_bias];
        }
        let [by_x, by_inner, by_outer, by_bias] = grads;
        [Some(y.into_data()), by_x, by_inner, by_outer, by_bias]
    }
}

const ALL: Tracked = [true; 4];

fn close(what: &str, got: All, expected: &All, dtype: DType) {
    let tolerance = 2.0 * unit(dtype);
    for (index, (got, expected)) in got.into_iter().zip(expected).enumerate() {
        assert_eq!(got.is_some(), expected.is_some(), "{what}, result {index}");
        let (Some(got), Some(expected)) = (got, expected) else {
            continue;
        };
        let what = format!("{what}, result {index}");
        assert_close(&what, got, &to_f64(expected.clone()), tolerance);
    }
}

/// The same bits as of the three operations, or as close as rounding to half precision, with and without the first product computed again, and with gradient checkpointing.
pub fn mlp_equals_its_parts(devices: &[Device]) {
    let mut ran = 0;
    for plain in devices {
        let problems = [
            Problem::new(1, [1, 1, 1], Activation::Relu, true),
            Problem::new(70, [20, 33, 12], Activation::GeluErf, true),
            Problem::new(300, [64, 136, 40], Activation::GeluSigmoid, true),
            Problem::new(40, [16, 24, 8], Activation::Silu, false),
            Problem::new(40, [16, 24, 8], Activation::None, true),
            Problem::new(40, [16, 24, 8], Activation::None, false),
            Problem::new(0, [6, 9, 4], Activation::GeluTanh, true),
        ];
        let exact = exact_dtypes(plain).into_iter().map(|(dtype, _)| [dtype; 2]);
        let halves = half_dtypes(plain);
        let half = halves.iter().map(|half| [*half, DType::F32]);
        let mut cases: Vec<_> = exact.chain(half).map(|dtypes| (dtypes, None)).collect();
        // Rounded for the products alone.
        cases.extend(
            halves
                .iter()
                .map(|half| ([DType::F32; 2], Some(FloatDType::from(*half)))),
        );
        for problem in &problems {
            for &(dtypes, product) in &cases {
                let device = plain.clone().autodiff();
                let parts = problem.run(&device, dtypes, product, ALL, None);
                for device in tracked(plain) {
                    for recompute in [false, true] {
                        let op = problem.run(&device, dtypes, product, ALL, Some(recompute));
                        let what =
                            format!("{plain:?}, {problem:?}, {dtypes:?}, {product:?}, {recompute}");
                        match product.map_or(dtypes[0], DType::from) {
                            // A kernel that makes two of the three may sum in another order.
                            dtype @ (DType::BF16 | DType::F16) => close(&what, op, &parts, dtype),
                            _ => assert_eq!(bits(&op), bits(&parts), "{what}"),
                        }
                        ran += 1;
                    }
                }
            }
        }
    }
    assert_ran("mlp_equals_its_parts", ran);
}

/// What is frozen gets no gradient, and changes no other: all combinations.
pub fn mlp_constants(devices: &[Device]) {
    for plain in devices {
        let device = plain.clone().autodiff();
        for activation in [Activation::Silu, Activation::None] {
            let problem = Problem::new(9, [8, 10, 6], activation, true);
            let all = problem.run(&device, [DType::F32; 2], None, ALL, None);
            for tracked in some_tracked::<4>().chain([[false; 4]]) {
                for recompute in [false, true] {
                    let some =
                        problem.run(&device, [DType::F32; 2], None, tracked, Some(recompute));
                    let what = format!("{plain:?}, {activation:?}, {tracked:?}, {recompute}");
                    let wanted = [true].into_iter().chain(tracked);
                    assert_wanted(&what, &some, &all, wanted);
                }
            }
        }
        // Plain in, plain out.
        let problem = Problem::new(9, [8, 10, 6], Activation::Silu, true);
        let plainly = problem.run(plain, [DType::F32; 2], None, [false; 4], Some(false));
        let parts = problem.run(plain, [DType::F32; 2], None, [false; 4], None);
        assert_eq!(bits(&plainly), bits(&parts));
    }
}

/// The result of one problem against f64, so that not everything is compared with itself.
pub fn mlp_equals_f64(devices: &[Device]) {
    let problem = Problem::new(7, [12, 20, 8], Activation::Relu, true);
    let [width, hidden, out] = problem.widths;
    let [x, inner, outer] = [(41, 7 * width), (42, width * hidden), (43, hidden * out)]
        .map(|(seed, count)| numbers(seed, count));
    let bias = numbers(44, hidden);
    let between: Vec<f64> = product(
        [7, width, hidden],
        |row, k| x[row * width + k],
        |k, column| inner[k * hidden + column],
    )
    .into_iter()
    .enumerate()
    .map(|(at, x)| (x + bias[at % hidden]).max(0.0))
    .collect();
    let expected = product(
        [7, hidden, out],
        |row, k| between[row * hidden + k],
        |k, column| outer[k * out + column],
    );
    for (device, dtype, tolerance) in exact(devices) {
        let tolerance = product_tolerance(device, dtype, 10.0 * tolerance);
        let [got, ..] = problem.run(device, [dtype; 2], None, [false; 4], Some(false));
        let got = got.expect("a result");
        assert_eq!(to_f64(got.clone()).len(), expected.len());
        assert_close(&format!("{device:?}, {dtype:?}"), got, &expected, tolerance);
    }
}
