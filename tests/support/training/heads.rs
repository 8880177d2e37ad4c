//! Rows split into heads and joined, against loops over all indices.

use burn_fused_ops::{join_heads, split_heads};

use crate::prelude::*;
use crate::training::results::*;

/// A call, with numbers in f64.
#[derive(Clone, Debug)]
struct Problem {
    batch: usize,
    seq: usize,
    /// Heads and their widths.
    parts: Vec<(usize, usize)>,
    x: Vec<f64>,
    bias: Option<Vec<f64>>,
    /// By each part; None: not used.
    grads: Vec<Option<Vec<f64>>>,
}

impl Problem {
    fn new([batch, seq]: [usize; 2], parts: &[(usize, usize)], bias: bool) -> Self {
        let width: usize = parts.iter().map(|(heads, dim)| heads * dim).sum();
        let grads = parts.iter().enumerate().map(|(index, (heads, dim))| {
            Some(numbers(43 + index as u64, batch * seq * heads * dim))
        });
        Self {
            batch,
            seq,
            parts: parts.to_vec(),
            x: numbers(41, batch * seq * width),
            bias: bias.then(|| numbers(42, width)),
            grads: grads.collect(),
        }
    }

    fn without(mut self, part: usize) -> Self {
        self.grads[part] = None;
        self
    }

    fn rounded(mut self, [x, bias]: [DType; 2]) -> Self {
        round_to(&mut self.x, x);
        self.grads
            .iter_mut()
            .flatten()
            .for_each(|grad| round_to(grad, x));
        if let Some(values) = &mut self.bias {
            round_to(values, bias);
        }
        self
    }

    fn width(&self) -> usize {
        self.parts.iter().map(|(heads, dim)| heads * dim).sum()
    }

    fn shape(&self, part: usize) -> [usize; 4] {
        let (heads, dim) = self.parts[part];
        [self.batch, heads, self.seq, dim]
    }

    /// Calls `visit` with the part, the place in the part and the place in x of each number.
    fn walk(&self, mut visit: impl FnMut(usize, usize, usize)) {
        let width = self.width();
        let mut start = 0;
        for (part, &(heads, dim)) in self.parts.iter().enumerate() {
            let mut at = 0;
            for batch in 0..self.batch {
                for head in 0..heads {
                    for position in 0..self.seq {
                        for number in 0..dim {
                            let row = batch * self.seq + position;
                            visit(part, at, row * width + start + head * dim + number);
                            at += 1;
                        }
                    }
                }
            }
            start += heads * dim;
        }
    }

    /// The parts, dx, and dbias if there is a bias.
    fn solve(&self) -> Vec<Vec<f64>> {
        let width = self.width();
        let mut results: Vec<Vec<f64>> = (0..self.parts.len())
            .map(|part| vec![0.0; self.shape(part).iter().product()])
            .collect();
        let mut dx = vec![0.0; self.x.len()];
        let mut by_bias = vec![0.0; width];
        self.walk(|part, at, place| {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[place % width]);
            results[part][at] = self.x[place] + bias;
            dx[place] = self.grads[part].as_ref().map_or(0.0, |grad| grad[at]);
            by_bias[place % width] += dx[place];
        });
        results.push(dx);
        if self.bias.is_some() {
            results.push(by_bias);
        }
        results
    }

    fn x(&self, device: &Device, dtype: DType) -> Tensor<3> {
        tensor(&self.x, [self.batch, self.seq, self.width()], device, dtype)
    }

    fn bias(&self, device: &Device, dtype: DType) -> Option<Tensor<1>> {
        let values = self.bias.as_ref()?;
        Some(tensor(values, [values.len()], device, dtype))
    }

    /// Sum over the parts that are used of the products with their gradients, and the parts.
    fn call(&self, x: Tensor<3>, bias: Option<Tensor<1>>) -> (Tensor<1>, Vec<Tensor<4>>) {
        let (device, dtype) = (x.device(), x.dtype());
        let parts = split_heads(x, bias, &self.parts).unwrap();
        assert_eq!(parts.len(), self.parts.len());
        let mut loss = Tensor::<1>::zeros([1], (&device, dtype));
        for (index, part) in parts.iter().enumerate() {
            assert_eq!((part.dims(), part.dtype()), (self.shape(index), dtype));
            if let Some(grad) = &self.grads[index] {
                let grad = tensor(grad, self.shape(index), &device, dtype);
                loss = loss + (part.clone() * grad).sum();
            }
        }
        (loss, parts)
    }

    /// As [`solve`](Self::solve), of the op. What is frozen has no gradient.
    fn run(
        &self,
        device: &Device,
        [dtype, bias_dtype]: [DType; 2],
        [x_tracked, bias_tracked]: [bool; 2],
    ) -> Vec<Option<TensorData>> {
        let x = self.x(device, dtype).set_require_grad(x_tracked);
        let bias = self.bias(device, bias_dtype);
        let bias = bias.map(|bias| bias.set_require_grad(bias_tracked));
        let (loss, parts) = self.call(x.clone(), bias.clone());
        let grads = loss.backward();
        let parts = parts.into_iter().map(|part| Some(part.inner().into_data()));
        let mut results: Vec<_> = parts.collect();
        results.push(gradient(&x, &grads));
        results.extend(bias.map(|bias| gradient(&bias, &grads)));
        results
    }

    fn check(&self, device: &Device, dtypes: [DType; 2], tolerance: f64) {
        let got = self.run(&device.clone().autodiff(), dtypes, [true; 2]);
        let (parts, used) = (&self.parts, self.grads.iter().map(Option::is_some));
        let used: Vec<bool> = used.collect();
        let (batch, seq) = (self.batch, self.seq);
        let what = format!("{device:?}, {dtypes:?}, {batch} × {seq}, {parts:?}, used {used:?}");
        let names: Vec<String> = (0..got.len())
            .map(|index| format!("result {index}"))
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let expected = self.solve().into_iter().map(Some);
        let parts = parts.len();
        assert_results(&what, &names, got, expected, |index| {
            // What is moved is not rounded.
            let moved = index == parts || (index < parts && self.bias.is_none());
            let tolerance = if moved { 0.0 } else { tolerance };
            (dtypes[usize::from(index > parts)], tolerance)
        });
    }
}

/// One part to three, of different numbers of heads and widths; parts without numbers.
const PARTS: [&[(usize, usize)]; 9] = [
    &[(1, 1)],
    &[(5, 3)],
    &[(4, 16), (2, 16), (2, 16)],
    &[(2, 48), (1, 64), (3, 3)],
    &[(3, 3), (8, 64)],
    &[(8, 64)],
    &[(2, 16), (0, 16), (1, 48)],
    &[(4, 0), (2, 8)],
    &[(3, 16), (3, 16), (3, 16)],
];

/// Batches and sequences.
const ROWS: [[usize; 2]; 9] = [
    [1, 1],
    [2, 7],
    [3, 100],
    [300, 1],
    [1, 130],
    [2, 33],
    [2, 5],
    [3, 9],
    [1, 1000],
];

/// The parts and the gradients by x and the bias, with all parts used and all but one.
pub fn heads_equal_f64(devices: &[Device]) {
    let mut problems = Vec::new();
    for (parts, rows) in PARTS.into_iter().zip(ROWS) {
        for bias in [false, true] {
            problems.push(Problem::new(rows, parts, bias));
            if parts.len() > 1 {
                let unused = (rows[1] + usize::from(bias)) % parts.len();
                problems.push(Problem::new(rows, parts, bias).without(unused));
            }
        }
    }
    // The last alone.
    let qkv = [(4, 16), (2, 16), (2, 16)];
    problems.push(Problem::new([2, 9], &qkv, true).without(0).without(1));
    // No rows: sums are 0.
    problems.push(Problem::new([0, 5], &qkv, true));
    problems.push(Problem::new([2, 0], &qkv[..1], true));
    // Steps that a cube makes along the rows, across batch entries.
    problems.push(Problem::new([3, 1100], &[(13, 77)], true));
    for problem in &problems {
        for (device, dtype, tolerance) in exact(devices) {
            let problem = problem.clone().rounded([dtype; 2]);
            problem.check(device, [dtype; 2], tolerance);
        }
    }
}

/// Half precision, and a bias of another dtype than x.
pub fn heads_in_half_precision(devices: &[Device]) {
    let parts = [(2, 48), (1, 64), (3, 3)];
    for device in devices {
        for half in half_dtypes(device) {
            for dtypes in [[half; 2], [half, DType::F32], [DType::F32, half]] {
                for parts in [&parts[..], &[(4, 16)]] {
                    let problem = Problem::new([2, 40], parts, true).rounded(dtypes);
                    problem.check(device, dtypes, unit(half));
                }
            }
        }
        if supports(device, DType::F64) {
            for dtypes in [[DType::F64, DType::F32], [DType::F32, DType::F64]] {
                let problem = Problem::new([2, 40], &parts, true).rounded(dtypes);
                problem.check(device, dtypes, 1e-5);
            }
        }
    }
}

/// Joining is the inverse of splitting, and its gradient is a split.
pub fn joined_heads_equal_f64(devices: &[Device]) {
    for (parts, rows) in PARTS.into_iter().zip(ROWS) {
        let problem = Problem::new(rows, &parts[..1], false);
        // The gradient by the part in place of the part: what is joined.
        let joined = problem.solve().remove(1);
        let by_joined = problem.solve().remove(0);
        for plain in devices {
            let device = plain.clone().autodiff();
            let halves = half_dtypes(plain).into_iter().map(|half| (half, 0.01));
            for (dtype, tolerance) in exact_dtypes(plain).into_iter().chain(halves) {
                let values = problem.grads[0].as_ref().unwrap();
                let leaf = tensor(values, problem.shape(0), &device, dtype).require_grad();
                let y = join_heads(leaf.clone()).unwrap();
                let shape = [problem.batch, problem.seq, problem.width()];
                assert_eq!((y.dims(), y.dtype()), (shape, dtype));
                let grads = (y.clone() * problem.x(&device, dtype)).sum().backward();
                let what = format!("{plain:?}, {dtype:?}, {:?}, {rows:?}", problem.parts);
                assert_close(&what, y.inner().into_data(), &joined, tolerance);
                let grad = leaf.grad(&grads).unwrap().into_data();
                assert_close(&what, grad, &by_joined, tolerance);
                // There and back.
                let x = problem.x(plain, dtype);
                let there = split_heads(x.clone(), None, &problem.parts).unwrap();
                let back = join_heads(there[0].clone()).unwrap();
                back.into_data().assert_eq(&x.into_data(), true);
            }
        }
    }
}

/// The same bits twice, whatever the strides of inputs and gradients, and with gradient checkpointing through steps that it computes again.
pub fn heads_give_the_same_bits(devices: &[Device]) {
    let problem = Problem::new([6, 50], &[(2, 48), (1, 64), (3, 4)], true);
    for plain in devices {
        let device = plain.clone().autodiff();
        let run = || bits(&problem.run(&device, [DType::F32; 2], [true; 2]));
        let first = run();
        assert_eq!(first, run(), "{plain:?}");
        for device in tracked(plain) {
            let leaf = problem.x(&device, DType::F32).require_grad();
            let bias = problem.bias(&device, DType::F32).unwrap().require_grad();
            let width = problem.width();
            let stored = (leaf.clone() * 2.0).swap_dims(0, 2);
            let x = stored.reshape([width, 50, 6]).swap_dims(0, 2) * 0.5;
            let parts = split_heads(x, Some(bias.clone() * 2.0 * 0.5), &problem.parts).unwrap();
            let mut loss = Tensor::<1>::zeros([1], (&device, DType::F32));
            for (index, part) in parts.iter().enumerate() {
                let grad = problem.grads[index].as_ref().unwrap();
                let grad = tensor(grad, problem.shape(index), &device, DType::F32);
                // A gradient that is a transposed view.
                loss = loss + (part.clone().swap_dims(2, 3) * grad.swap_dims(2, 3)).sum();
            }
            let grads = loss.backward();
            let parts = parts.into_iter().map(|part| Some(part.inner().into_data()));
            let mut again: Vec<_> = parts.collect();
            again.extend([gradient(&leaf, &grads), gradient(&bias, &grads)]);
            assert_eq!(first, bits(&again), "{device:?}");
        }
        // Views that nothing has copied before, of rows and of heads.
        let view = stored_swapped(&problem.x(plain, DType::F32), 0, 2);
        let bias = problem.bias(plain, DType::F32);
        let parts = split_heads(view, bias, &problem.parts).unwrap();
        let found: Vec<_> = parts
            .iter()
            .map(|part| Some(part.clone().into_data()))
            .collect();
        assert_eq!(first[..3], bits(&found), "{plain:?}");
        let view = stored_swapped(&parts[0], 1, 3);
        let expected = join_heads(parts[0].clone()).unwrap().into_data();
        let joined = join_heads(view).unwrap().into_data();
        joined.assert_eq(&expected, true);
    }
}

/// What is frozen gets no gradient, and changes no other.
pub fn heads_constants(devices: &[Device]) {
    let problem = Problem::new([2, 9], &[(2, 3), (1, 4)], true);
    for plain in devices {
        let device = plain.clone().autodiff();
        let all = problem.run(&device, [DType::F32; 2], [true; 2]);
        for tracked in [[false, true], [true, false]] {
            let some = problem.run(&device, [DType::F32; 2], tracked);
            let wanted = [true, true].into_iter().chain(tracked);
            assert_wanted(&format!("{plain:?}, {tracked:?}"), &some, &all, wanted);
        }
        // Nothing tracked: nothing to be differentiated.
        for device in [plain, &device] {
            let x = problem.x(device, DType::F32);
            let bias = problem.bias(device, DType::F32);
            let parts = split_heads(x, bias, &problem.parts).unwrap();
            assert!(parts.iter().all(|part| !part.is_require_grad()));
            let joined = join_heads(parts[0].clone()).unwrap();
            assert!(!joined.is_require_grad());
            assert_eq!(joined.device().is_autodiff(), device.is_autodiff());
        }
    }
}

/// Queries, keys and values that meet in one product, and a part that is used twice: gradients are sums.
pub fn heads_are_differentiated_together(devices: &[Device]) {
    let problem = Problem::new([2, 5], &[(2, 3), (2, 3), (2, 3)], true);
    let x_count = problem.x.len();
    for plain in devices {
        let tracked = plain.clone().autodiff();
        for (dtype, tolerance) in exact_dtypes(plain) {
            // Of Burn's own operations, for the same numbers.
            let own = |x: Tensor<3>, bias: Tensor<1>| -> Vec<Tensor<4>> {
                let x = x + bias.reshape([1, 1, 18]);
                (0..3)
                    .map(|part| {
                        let part = x.clone().slice([0..2, 0..5, part * 6..part * 6 + 6]);
                        part.reshape([2, 5, 2, 3]).swap_dims(1, 2)
                    })
                    .collect()
            };
            let loss = |parts: Vec<Tensor<4>>| {
                let [q, k, v]: [Tensor<4>; 3] = parts.try_into().unwrap();
                let scores = q.clone() * k.clone() + k.powi_scalar(2);
                (scores * v.clone() + q * v).tanh().sum()
            };
            let grads = |ours: bool| {
                let x = problem.x(&tracked, dtype).require_grad();
                let bias = problem.bias(&tracked, dtype).unwrap().require_grad();
                let parts = match ours {
                    true => split_heads(x.clone(), Some(bias.clone()), &problem.parts).unwrap(),
                    false => own(x.clone(), bias.clone()),
                };
                let grads = loss(parts).backward();
                let of_x = x.grad(&grads).unwrap().into_data();
                [of_x, bias.grad(&grads).unwrap().into_data()]
            };
            let [by_x, by_bias] = grads(true);
            let [own_x, own_bias] = grads(false).map(to_f64);
            assert_eq!(own_x.len(), x_count);
            assert_close("dx", by_x, &own_x, tolerance);
            assert_close("dbias", by_bias, &own_bias, tolerance);
        }
    }
}

/// What will run is said before, in words.
pub fn heads_plans(devices: &[Device]) {
    for device in devices {
        let x = Tensor::<3>::zeros([2, 10, 128], device);
        let bias = Tensor::<1>::zeros([128], device);
        let parts = [(4, 16), (2, 16), (2, 16)];
        for (bias, parts) in [(Some(&bias), &parts[..]), (None, &[(8, 16)])] {
            assert_plan(
                &burn_fused_ops::explain::split_heads(&x, bias, parts).unwrap(),
                device,
            );
        }
    }
}
