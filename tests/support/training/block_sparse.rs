//! Products with block-sparse weights and their gradients, against f64.

use burn::tensor::FloatDType;
use burn_fused_ops::sparse_linear::{BlockSparseLinearOptions, WeightLayout, block_sparse_linear};
use burn_fused_ops::{LinearOptions, linear};

use crate::prelude::*;
use crate::training::results::*;

struct Problem {
    batch: usize,
    rows: usize,
    layout: WeightLayout,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    gates: Option<Vec<f64>>,
    grad: Vec<f64>,
}

/// What is compared: y, dx, dW, and the gradients by the bias and the gates.
const NAMES: [&str; 5] = ["y", "dx", "dW", "dbias", "dgates"];

impl Problem {
    fn new([batch, rows]: [usize; 2], layout: WeightLayout) -> Self {
        let block = layout.block();
        Self {
            batch,
            rows,
            x: numbers(1, batch * rows * layout.inputs()),
            weight: numbers(2, layout.len() * block * block),
            bias: None,
            gates: None,
            grad: numbers(3, batch * rows * layout.outputs()),
            layout,
        }
    }

    fn with_bias_and_gates(mut self) -> Self {
        self.bias = Some(numbers(4, self.layout.outputs()));
        self.gates = Some(numbers(5, self.layout.len()));
        self
    }

    fn round_to(&mut self, dtype: DType) {
        for values in [&mut self.x, &mut self.weight, &mut self.grad] {
            round_to(values, dtype);
        }
    }

    fn expected(&self) -> Judged<5> {
        let (rows, block) = (self.batch * self.rows, self.layout.block());
        let (ins, outs) = (self.layout.inputs(), self.layout.outputs());
        let mut y = vec![0.0; rows * outs];
        let mut dx = vec![0.0; rows * ins];
        let mut dw = vec![0.0; self.weight.len()];
        let mut dgates = vec![0.0; self.layout.len()];
        for (index, (input, output)) in self.layout.kept_blocks().enumerate() {
            let gate = self.gates.as_ref().map_or(1.0, |gates| gates[index]);
            for i in 0..block {
                for o in 0..block {
                    let at = (index * block + i) * block + o;
                    let weight = self.weight[at];
                    let (i, o) = (input as usize * block + i, output as usize * block + o);
                    let mut sum = 0.0;
                    for row in 0..rows {
                        let (x, grad) = (self.x[row * ins + i], self.grad[row * outs + o]);
                        y[row * outs + o] += x * weight * gate;
                        dx[row * ins + i] += grad * weight * gate;
                        sum += x * grad;
                    }
                    dw[at] = sum * gate;
                    dgates[index] += sum * weight;
                }
            }
        }
        let dbias = self.bias.as_ref().map(|bias| {
            let mut dbias = vec![0.0; outs];
            for row in 0..rows {
                for o in 0..outs {
                    y[row * outs + o] += bias[o];
                    dbias[o] += self.grad[row * outs + o];
                }
            }
            dbias
        });
        let dgates = self.gates.as_ref().map(|_| dgates);
        [Some(y), Some(dx), Some(dw), dbias, dgates]
    }

    /// The same of the op, for x and weights of `dtypes`.
    fn run(
        &self,
        device: &Device,
        [x_dtype, weight_dtype]: [DType; 2],
        dtype: Option<FloatDType>,
    ) -> Given<5> {
        let shape = [self.batch, self.rows, self.layout.inputs()];
        let x = tensor(&self.x, shape, device, x_dtype).require_grad();
        let weight = tensor(&self.weight, self.layout.shape(), device, weight_dtype).require_grad();
        let leaf =
            |values: &Vec<f64>| tensor(values, [values.len()], device, weight_dtype).require_grad();
        let mut options = BlockSparseLinearOptions::default();
        options.bias = self.bias.as_ref().map(leaf);
        options.gates = self.gates.as_ref().map(leaf);
        options.dtype = dtype;
        let beside = [options.bias.clone(), options.gates.clone()];
        let y = block_sparse_linear(x.clone(), weight.clone(), &self.layout, options).unwrap();
        let shape = [self.batch, self.rows, self.layout.outputs()];
        assert_eq!(y.dims(), shape);
        let expected = dtype.map_or(x_dtype, DType::from);
        assert_eq!(y.dtype(), expected);
        let grad = tensor(&self.grad, shape, device, expected);
        let grads = (y.clone() * grad).sum().backward();
        let (dx, dw) = (x.grad(&grads).unwrap(), weight.grad(&grads).unwrap());
        assert_eq!([dx.dtype(), dw.dtype()], [x_dtype, weight_dtype]);
        let [dbias, dgates] = beside.map(|leaf| Some(leaf?.grad(&grads).unwrap().into_data()));
        let own = [y.into_data(), dx.into_data(), dw.into_data()].map(Some);
        let [y, dx, dw] = own;
        [y, dx, dw, dbias, dgates]
    }

    fn check(&self, what: &str, got: Given<5>, tolerances: [f64; 5]) {
        let (batch, rows, layout) = (self.batch, self.rows, &self.layout);
        let what = format!("{what}, [{batch}, {rows}] rows, {layout}");
        let dtypes = got
            .each_ref()
            .map(|got| got.as_ref().map_or(DType::F32, |got| got.dtype()));
        assert_results(&what, &NAMES, got, self.expected(), |index| {
            (dtypes[index], tolerances[index])
        });
    }
}

fn problems() -> Vec<Problem> {
    let random = |shape, block, density| WeightLayout::random(shape, block, density, 3).unwrap();
    // Output blocks 0 and 3 and input block 1 keep nothing.
    let holes = WeightLayout::from_mask([48, 64], 16, &HOLES).unwrap();
    let none = WeightLayout::from_mask([16, 32], 16, &[false; 2]).unwrap();
    let world = WeightLayout::small_world([128, 96], 16, 0.3, 0.2, 1).unwrap();
    let hubs = WeightLayout::barabasi_albert([128, 160], 32, 0.4, 2).unwrap();
    vec![
        Problem::new([1, 1], WeightLayout::dense([16, 16], 16).unwrap()),
        Problem::new([1, 7], holes.clone()),
        Problem::new([3, 11], holes).with_bias_and_gates(),
        Problem::new([2, 5], none).with_bias_and_gates(),
        Problem::new([1, 300], world).with_bias_and_gates(),
        Problem::new([2, 33], hubs),
        Problem::new([2, 9], WeightLayout::banded([192, 384], 64, 1).unwrap()),
        Problem::new([1, 40], random([384, 256], 128, 0.5)).with_bias_and_gates(),
        // The rows of a weight's gradient in groups, and a long sum that is not.
        Problem::new([4, 1024], random([48, 32], 16, 0.5)),
        Problem::new([1, 5000], random([32, 48], 16, 0.5)),
        Problem::new([2, 0], random([32, 48], 16, 0.5)).with_bias_and_gates(),
    ]
}

const HOLES: [bool; 12] = [
    false, true, true, false, // input block 0
    false, false, false, false, // 1
    false, true, false, false, // 2
];

/// Every block size and kind of layout, with and without bias and gates, empty blocks of outputs and of inputs, no blocks, no rows.
pub fn block_sparse_products_equal_f64(devices: &[Device]) {
    for problem in problems() {
        for (device, dtype, tolerance) in exact(devices) {
            let tolerance = product_tolerance(device, dtype, tolerance);
            for tracked in tracked(device) {
                let run = || problem.run(&tracked, [dtype; 2], None);
                let got = run();
                assert_eq!(got, run(), "the same bits twice");
                problem.check(&format!("{device:?}, {dtype:?}"), got, [tolerance; 5]);
            }
        }
    }
}

/// Factors are rounded, sums are not: gradients are f32 where their tensors are.
pub fn block_sparse_products_in_half_precision(devices: &[Device]) {
    let world = WeightLayout::small_world([128, 96], 16, 0.3, 0.2, 1).unwrap();
    let random = WeightLayout::random([192, 128], 64, 0.5, 3).unwrap();
    for mut problem in [Problem::new([2, 20], world), Problem::new([1, 70], random)] {
        for (device, half) in halves(devices) {
            let rounding = if half == DType::BF16 { 4e-3 } else { 5e-4 };
            problem.round_to(half);
            let device = device.clone().autodiff();
            let what = format!("{device:?}, {half:?}");
            let dtype = Some(FloatDType::from(half));
            let got = problem.run(&device, [DType::F32; 2], dtype);
            problem.check(&what, got, [rounding, 1e-5, 1e-5, 0.0, 0.0]);
            let got = problem.run(&device, [half, DType::F32], None);
            problem.check(&what, got, [rounding, rounding, 1e-5, 0.0, 0.0]);
            let got = problem.run(&device, [half; 2], None);
            problem.check(&what, got, [rounding; 5]);
        }
    }
}

/// The same numbers whatever the strides of the inputs and of the gradient.
pub fn block_sparse_products_of_any_strides(devices: &[Device]) {
    let layout = WeightLayout::random([64, 48], 16, 0.5, 1).unwrap();
    for device in devices {
        let device = &device.clone().autodiff();
        let x = tensor(&numbers(1, 40 * 64), [40, 64], device, DType::F32);
        let weight = numbers(2, layout.len() * 256);
        let weight = tensor(&weight, layout.shape(), device, DType::F32);
        let (other_x, other_weight) = (stored_swapped(&x, 0, 1), stored_swapped(&weight, 1, 2));
        let run = |x: Tensor<2>, weight: Tensor<3>| {
            let (x, weight) = (x.require_grad(), weight.require_grad());
            let options = BlockSparseLinearOptions::default();
            let y = block_sparse_linear(x.clone(), weight.clone(), &layout, options).unwrap();
            // A gradient that is a transposed view.
            let seed = tensor(&numbers(3, 40 * 48), [48, 40], device, DType::F32);
            let grads = (y.clone().transpose() * seed).sum().backward();
            let by_weight = weight.grad(&grads).unwrap().into_data();
            [y, x.grad(&grads).unwrap()]
                .map(Tensor::into_data)
                .into_iter()
                .chain([by_weight])
        };
        let plain: Vec<TensorData> = run(x.clone(), weight.clone()).collect();
        for (x, weight) in [
            (other_x.clone(), other_weight.clone()),
            (other_x, weight),
            (x, other_weight),
        ] {
            for (got, expected) in run(x, weight).zip(&plain) {
                let tolerance = product_tolerance(device, DType::F32, 1e-6);
                assert_close("strides", got, &to_f64(expected.clone()), tolerance);
            }
        }
    }
}

/// Frozen weights and constant inputs get no gradient and do not disturb the others'.
pub fn block_sparse_products_differentiate_what_is_tracked(devices: &[Device]) {
    let layout = WeightLayout::random([64, 48], 16, 0.5, 1).unwrap();
    let problem = Problem::new([1, 30], layout.clone()).with_bias_and_gates();
    let expected = problem.expected();
    for plain in devices {
        let device = &plain.clone().autodiff();
        let tolerance = product_tolerance(plain, DType::F32, 1e-5);
        let run = |tracked: [bool; 4]| {
            let list = |values: &Option<Vec<f64>>, tracked| {
                let values = values.as_ref().unwrap();
                tensor(values, [values.len()], device, DType::F32).set_require_grad(tracked)
            };
            let x = tensor(&problem.x, [30, 64], device, DType::F32).set_require_grad(tracked[0]);
            let weight = tensor(&problem.weight, layout.shape(), device, DType::F32)
                .set_require_grad(tracked[1]);
            let (bias, gates) = (
                list(&problem.bias, tracked[2]),
                list(&problem.gates, tracked[3]),
            );
            let options = BlockSparseLinearOptions::default()
                .bias(bias.clone())
                .gates(gates.clone());
            let y = block_sparse_linear(x.clone(), weight.clone(), &layout, options).unwrap();
            let grad = tensor(&problem.grad, [30, 48], device, DType::F32);
            let grads = (y * grad).sum().backward();
            let [bias, gates] = [&bias, &gates].map(|list| gradient(list, &grads));
            let got = [gradient(&x, &grads), gradient(&weight, &grads), bias, gates];
            for (index, (got, expected)) in got.into_iter().zip(&expected[1..]).enumerate() {
                assert_eq!(got.is_some(), tracked[index], "{tracked:?}, input {index}");
                if let Some(got) = got {
                    let expected = expected.as_ref().unwrap();
                    assert_close("tracked", got, expected, tolerance);
                }
            }
        };
        for index in 0..4 {
            run(std::array::from_fn(|at| at == index));
            run(std::array::from_fn(|at| at != index));
        }
        // Nothing tracked: plain in, plain out.
        let x = tensor(&problem.x, [30, 64], plain, DType::F32);
        let weight = tensor(&problem.weight, layout.shape(), plain, DType::F32);
        let options = BlockSparseLinearOptions::default();
        let y = block_sparse_linear(x, weight, &layout, options).unwrap();
        assert!(!y.device().is_autodiff());
    }
}

/// A layout that keeps every block is a dense product.
pub fn dense_layouts_equal_linear(devices: &[Device]) {
    let (ins, outs, block) = (6, 4, 32);
    let layout = WeightLayout::dense([ins * block, outs * block], block).unwrap();
    for device in devices {
        let device = &device.clone().autodiff();
        let tolerance = product_tolerance(device, DType::F32, 1e-6);
        let dense = tensor(
            &numbers(1, ins * outs * block * block),
            [ins * block, outs * block],
            device,
            DType::F32,
        );
        // [in blocks, block, out blocks, block] as [out blocks, in blocks, block, block]
        let blocks = dense.clone().reshape([ins, block, outs, block]);
        let blocks = blocks.permute([2, 0, 1, 3]).reshape(layout.shape());
        let x = tensor(
            &numbers(2, 50 * ins * block),
            [50, ins * block],
            device,
            DType::F32,
        );
        let options = BlockSparseLinearOptions::default();
        let got = block_sparse_linear(x.clone(), blocks, &layout, options).unwrap();
        let expected = linear(x, dense, &LinearOptions::default()).unwrap();
        let expected = to_f64(expected.into_data());
        assert_close("dense", got.into_data(), &expected, tolerance);
    }
}
