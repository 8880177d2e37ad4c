//! Sums of gated branches against f64 loops.

use burn_sparse_select::nsa::NsaBranches;

use crate::prelude::*;
use crate::training::results::*;

const BRANCHES: usize = NsaBranches::COUNT;

/// All branches.
const ALL: [bool; BRANCHES] = [true; BRANCHES];

/// Names of a call's results, in the order of [`Problem::solve`] and [`Problem::run`].
const NAMES: [&str; 2 + BRANCHES] = ["out", "by gates", "by 0", "by 1", "by 2"];

/// A call, with numbers in f64.
#[derive(Clone)]
struct Problem {
    shape: [usize; 4],
    branches: [Option<Vec<f64>>; BRANCHES],
    gates: Vec<f64>,
    grad: Vec<f64>,
}

/// The tensors of a call.
struct Tensors {
    branches: [Option<Tensor<4>>; BRANCHES],
    gates: Tensor<4>,
    grad: Tensor<4>,
}

impl Problem {
    /// Of the branches that are there; the second always is.
    fn new(shape: [usize; 4], there: [bool; BRANCHES]) -> Self {
        let count = shape.iter().product();
        let rows: usize = shape[..3].iter().product();
        Self {
            shape,
            branches: [0, 1, 2].map(|at| there[at].then(|| numbers(40 + at as u64, count))),
            gates: numbers(43, rows * BRANCHES),
            grad: numbers(44, count),
        }
    }

    fn rounded(mut self, [dtype, of_gates]: [DType; 2]) -> Self {
        self.branches
            .iter_mut()
            .flatten()
            .for_each(|x| round_to(x, dtype));
        round_to(&mut self.grad, dtype);
        round_to(&mut self.gates, of_gates);
        self
    }

    fn solve(&self) -> Judged<{ 2 + BRANCHES }> {
        let width = self.shape[3];
        let gate = |at: usize, branch: usize| self.gates[at / width * BRANCHES + branch];
        let mut out = vec![0.0; self.grad.len()];
        let mut by_gates = vec![0.0; self.gates.len()];
        for (branch, x) in self.branches.iter().enumerate() {
            for (at, x) in x.iter().flatten().enumerate() {
                out[at] += gate(at, branch) * x;
                by_gates[at / width * BRANCHES + branch] += x * self.grad[at];
            }
        }
        let by_branch = |branch: usize| {
            let grads = self.grad.iter().enumerate();
            let by = grads.map(|(at, grad)| grad * gate(at, branch)).collect();
            self.branches[branch].as_ref().map(|_| by)
        };
        let [first, second, third] = [0, 1, 2].map(by_branch);
        [Some(out), Some(by_gates), first, second, third]
    }

    fn gates_shape(&self) -> [usize; 4] {
        let [batch, heads, seq, _] = self.shape;
        [batch, heads, seq, BRANCHES]
    }

    fn tensors(&self, device: &Device, [dtype, of_gates]: [DType; 2]) -> Tensors {
        let of = |x: &Vec<f64>| tensor(x, self.shape, device, dtype);
        Tensors {
            branches: self.branches.each_ref().map(|x| x.as_ref().map(of)),
            gates: tensor(&self.gates, self.gates_shape(), device, of_gates),
            grad: of(&self.grad),
        }
    }

    /// The same of the op; branches, and the gates behind them, have gradients where they are `tracked`.
    fn run(
        &self,
        device: &Device,
        dtypes: [DType; 2],
        tracked: [bool; BRANCHES + 1],
    ) -> Given<{ 2 + BRANCHES }> {
        let mut x = self.tensors(device, dtypes);
        for (branch, tracked) in x.branches.iter_mut().zip(tracked) {
            *branch = branch.take().map(|branch| branch.set_require_grad(tracked));
        }
        x.gates = x.gates.set_require_grad(tracked[BRANCHES]);
        let out = gated(x.branches.clone(), x.gates.clone());
        assert_eq!((out.dims(), out.dtype()), (self.shape, dtypes[0]));
        let grads = (out.clone() * x.grad).sum().backward();
        let [first, second, third] = x.branches.each_ref().map(|x| gradient(x.as_ref()?, &grads));
        let by_gates = gradient(&x.gates, &grads);
        [
            Some(out.inner().into_data()),
            by_gates,
            first,
            second,
            third,
        ]
    }

    /// What a device gives, and what it should, by name.
    fn compared(
        &self,
        device: &Device,
        dtypes: [DType; 2],
    ) -> impl Iterator<Item = (String, TensorData, Vec<f64>)> {
        let got = self.run(&device.clone().autodiff(), dtypes, [true; BRANCHES + 1]);
        let what = format!("{device:?}, {dtypes:?}, {:?}", self.shape);
        let pairs = got.into_iter().zip(self.solve()).zip(NAMES);
        pairs.filter_map(move |((got, expected), name)| {
            let what = format!("{what}: {name}");
            assert_eq!(got.is_some(), expected.is_some(), "{what}");
            let (got, expected) = (got?, expected?);
            let dtype = dtypes[usize::from(name == "by gates")];
            assert_eq!(got.dtype(), dtype, "{what}");
            Some((what, got, expected))
        })
    }
}

fn gated([first, second, third]: [Option<Tensor<4>>; BRANCHES], gates: Tensor<4>) -> Tensor<4> {
    let second = second.expect("the second is always there");
    let branches = NsaBranches::new(first, second, third);
    branches.gated(gates).unwrap()
}

/// Rows and widths of all kinds, with and without the branches that may be off.
const CASES: [([usize; 4], [bool; BRANCHES]); 12] = [
    ([1, 1, 1, 1], ALL),
    ([2, 3, 5, 7], ALL),
    ([2, 3, 50, 33], [false, true, true]),
    ([1, 2, 300, 8], [true, true, false]),
    ([2, 2, 33, 128], ALL),
    ([1, 2, 9, 96], [false, true, false]),
    // More vectors than a row has units.
    ([1, 2, 5, 1000], ALL),
    ([1, 1, 3, 259], [true, true, false]),
    ([1, 4, 70, 2], ALL),
    // Nothing.
    ([0, 2, 3, 4], ALL),
    ([1, 2, 0, 8], [false, true, true]),
    ([1, 2, 3, 0], [true, true, false]),
];

/// The sum and the gradients by branches and gates.
pub fn gated_sums_equal_f64(devices: &[Device]) {
    for (shape, there) in CASES {
        let problem = Problem::new(shape, there);
        for device in devices {
            for (dtype, tolerance) in exact_dtypes(device) {
                for (what, got, expected) in problem.compared(device, [dtype; 2]) {
                    assert_close(&what, got, &expected, tolerance);
                }
            }
            if supports(device, DType::F64) {
                for dtypes in [[DType::F64, DType::F32], [DType::F32, DType::F64]] {
                    let problem = problem.clone().rounded(dtypes);
                    for (what, got, expected) in problem.compared(device, dtypes) {
                        assert_close(&what, got, &expected, 1e-5);
                    }
                }
            }
        }
    }
}

/// In half precision every number is rounded once, whatever the gates' dtype; gates in f32 are not rounded.
pub fn gated_sums_in_half_precision(devices: &[Device]) {
    for (device, half) in halves(devices) {
        for dtypes in [[half; 2], [half, DType::F32], [DType::F32, half]] {
            for (shape, there) in [
                ([2, 2, 40, 128], ALL),
                ([1, 3, 20, 36], [true, true, false]),
            ] {
                let problem = Problem::new(shape, there).rounded(dtypes);
                for (what, got, expected) in problem.compared(device, dtypes) {
                    let unit = unit(got.dtype());
                    for (at, (got, expected)) in to_f64(got).iter().zip(expected).enumerate() {
                        // Sums of up to 128 products in f32, and numbers below the smallest of f16.
                        let within = unit * expected.abs() + 3e-5;
                        assert_near(&format!("{what} at {at}"), &[*got], &[expected], within);
                    }
                }
            }
        }
    }
}

/// The same bits twice, by views of any strides, and with gradient checkpointing through steps that it computes again.
pub fn gated_sums_give_the_same_bits(devices: &[Device]) {
    let f32s = [DType::F32; 2];
    let problem = Problem::new([2, 3, 40, 24], ALL);
    for plain in devices {
        let device = plain.clone().autodiff();
        let run = || bits(&problem.run(&device, f32s, [true; BRANCHES + 1]));
        let first = run();
        assert_eq!(first, run(), "{plain:?}");
        for device in tracked(plain) {
            let x = problem.tensors(&device, f32s);
            let leaves = x.branches.map(|x| x.unwrap().require_grad());
            let gates = x.gates.require_grad();
            // As products give them: heads beside each other.
            let strided = |x: Tensor<4>| (x.swap_dims(1, 2) * 2.0).swap_dims(1, 2) * 0.5;
            let branches = leaves.clone().map(|x| Some(strided(x)));
            let out = gated(branches, strided(gates.clone()));
            let grad = x.grad.swap_dims(1, 3);
            let grads = (out.clone().swap_dims(1, 3) * grad).sum().backward();
            let [a, b, c] = leaves.map(|x| gradient(&x, &grads));
            let again = bits(&[
                Some(out.inner().into_data()),
                gradient(&gates, &grads),
                a,
                b,
                c,
            ]);
            assert_eq!(first, again, "{device:?}");
        }
    }
}

/// Inputs and gradients that are used again are as they were, though results may take their places; and one tensor may be all branches.
pub fn gated_sums_keep_their_inputs(devices: &[Device]) {
    let f32s = [DType::F32; 2];
    let problem = Problem::new([1, 2, 9, 12], ALL);
    for plain in devices {
        for device in [plain.clone(), plain.clone().autodiff()] {
            let x = problem.tensors(&device, f32s);
            let before = x.branches.clone().map(|x| read(x.unwrap()));
            let once = read(gated(x.branches.clone(), x.gates.clone()));
            let one = x.branches[0].clone();
            let _ = gated([one.clone(), one.clone(), one], x.gates.clone());
            for (x, before) in x.branches.iter().zip(&before) {
                let x = x.clone().unwrap();
                x.into_data().assert_eq(before, true);
            }
            // The last use.
            let twice = gated(x.branches, x.gates);
            twice.into_data().assert_eq(&once, true);
        }
        let x = problem.tensors(&plain.clone().autodiff(), f32s);
        let leaf = x.branches[1].clone().unwrap().require_grad();
        let before = read(x.grad.clone().inner());
        let out = gated([None, Some(leaf.clone()), None], x.gates);
        // The gradient by the sum is this tensor, which the caller keeps.
        let grads = (out * x.grad.clone()).sum().backward();
        assert!(leaf.grad(&grads).is_some());
        x.grad.inner().into_data().assert_eq(&before, true);
    }
}

/// What is frozen gets no gradient, and changes no other.
pub fn gated_sums_constants(devices: &[Device]) {
    let problem = Problem::new([2, 2, 9, 20], [true, true, false]);
    let f32s = [DType::F32; 2];
    for plain in devices {
        let device = plain.clone().autodiff();
        let all = problem.run(&device, f32s, [true; BRANCHES + 1]);
        for tracked in [
            [true, false, false, false],
            [false, true, false, true],
            [false, false, false, true],
            [true, true, false, false],
        ] {
            let got = problem.run(&device, f32s, tracked);
            let by_gates = tracked[BRANCHES];
            let wanted = [true, by_gates, tracked[0], tracked[1], tracked[2]];
            assert_wanted(&format!("{plain:?}, {tracked:?}"), &got, &all, wanted);
        }
    }
}

/// More numbers than 32 bits count, for a large GPU: the last rows are those of a small call.
pub fn gated_sums_of_more_than_2_31_elements(devices: &[Device]) {
    let (heads, seq, width, last) = (5, 1 << 22, 128, 40);
    let problem = Problem::new([1, 1, last, width], [true, true, false]);
    for device in devices {
        let dtypes = [DType::BF16; 2];
        let device = device.clone().autodiff();
        let small = problem.tensors(&device, dtypes);
        // Zeros, and the small call's rows at the end.
        let large = |x: Tensor<4>| {
            let [.., rows, width] = x.dims();
            let zeros = Tensor::<4>::zeros([1, heads, seq, width], (&device, dtypes[0]));
            let at = [0..1, heads - 1..heads, seq - rows..seq, 0..width];
            zeros.slice_assign(at, x)
        };
        let [first, second, _] = small.branches;
        let branches = [first, second].map(|x| large(x.unwrap()).detach().require_grad());
        let gates = large(small.gates).detach().require_grad();
        let [a, b] = branches.clone();
        let out = gated([Some(a), Some(b), None], gates.clone());
        assert!(out.shape().num_elements() > 1 << 31);
        let tail = |x: Tensor<4>| {
            let [_, heads, seq, width] = x.dims();
            x.slice([0..1, heads - 1..heads, seq - last..seq, 0..width])
        };
        let seen = tail(out.clone().inner()).into_data();
        let grads = (tail(out) * small.grad).sum().backward();
        let [by_first, by_second] = branches.map(|x| tail(x.grad(&grads).unwrap()).into_data());
        let by_gates = tail(gates.grad(&grads).unwrap()).into_data();
        let got = [seen, by_gates, by_first, by_second];
        let expected = problem.run(&device, dtypes, [true; BRANCHES + 1]);
        for (got, expected) in got.into_iter().zip(expected) {
            got.assert_eq(&expected.unwrap(), true);
        }
    }
}
