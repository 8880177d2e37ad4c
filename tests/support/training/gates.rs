//! Sums of gated branches against f64 loops.

use burn_sparse_select::nsa::NsaBranches;

use crate::prelude::*;
use crate::training::case::*;

const BRANCHES: usize = NsaBranches::COUNT;

const ALL: [bool; BRANCHES] = [true; BRANCHES];

/// Makes a case of the branches that are present (the second always is), the gates and the gradient.
fn case(shape: [usize; 4], there: [bool; BRANCHES]) -> Case<'static> {
    let [batch, heads, seq, width] = shape;
    let of_gates = [batch, heads, seq, BRANCHES];
    let call = move |x: &mut Tensors| {
        let gates = x.take();
        let branches = there.map(|there| there.then(|| x.take()));
        vec![gated(branches, gates).into()]
    };
    let judge = move |x: &[Vec<f64>], grads: &[Vec<f64>]| {
        let (gates, grad) = (&x[0], &grads[0]);
        let gate = |at: usize, branch: usize| gates[at / width * BRANCHES + branch];
        let (mut out, mut by_gates) = (vec![0.0; grad.len()], vec![0.0; gates.len()]);
        let branches = (0..BRANCHES).filter(|branch| there[*branch]).zip(&x[1..]);
        for (branch, x) in branches.clone() {
            for (at, x) in x.iter().enumerate() {
                out[at] += gate(at, branch) * x;
                by_gates[at / width * BRANCHES + branch] += x * grad[at];
            }
        }
        let by_branch = branches.map(|(branch, _)| {
            let grads = grad.iter().enumerate();
            grads.map(|(at, grad)| grad * gate(at, branch)).collect()
        });
        [out, by_gates].into_iter().chain(by_branch).collect()
    };
    let case = Case::new(format!("{shape:?}, {there:?}"), call, judge)
        .input("gates", 1, &of_gates, 43)
        .result("out", 0, &shape, 44);
    (0..BRANCHES).fold(case, |case, at| {
        let (name, seed) = (format!("branch {at}"), 40 + at as u64);
        case.input_if(there[at], &name, 0, &shape, seed)
    })
}

fn gated([first, second, third]: [Option<Tensor<4>>; BRANCHES], gates: Tensor<4>) -> Tensor<4> {
    let second = second.expect("the second is always there");
    let branches = NsaBranches::new(first, second, third);
    branches.gated(gates).unwrap()
}

/// Many numbers of rows and widths, with and without the optional branches.
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
    // Empty tensors.
    ([0, 2, 3, 4], ALL),
    ([1, 2, 0, 8], [false, true, true]),
    ([1, 2, 3, 0], [true, true, false]),
];

/// The sum and the gradients with respect to branches and gates.
pub fn gated_sums_equal_f64(devices: &[Device]) {
    for (shape, there) in CASES {
        let case = case(shape, there);
        for (device, dtype, tolerance) in exact(devices) {
            case.check_in(device, dtype, tolerance);
        }
        for device in with(devices, DType::F64) {
            for dtypes in [[DType::F64, DType::F32], [DType::F32, DType::F64]] {
                case.check(device, &dtypes, |_| 1e-5);
            }
        }
    }
}

/// In half precision every element is rounded once, whatever the gates' dtype; f32 gates are not rounded.
pub fn gated_sums_in_half_precision(devices: &[Device]) {
    for (device, half) in halves(devices) {
        for dtypes in [[half; 2], [half, DType::F32], [DType::F32, half]] {
            let some = [true, true, false];
            for (shape, there) in [([2, 2, 40, 128], ALL), ([1, 3, 20, 36], some)] {
                for (what, got, expected) in case(shape, there).compared(device, &dtypes) {
                    let unit = unit(got.dtype());
                    for (at, (got, expected)) in to_f64(got).iter().zip(expected).enumerate() {
                        // Sums of up to 128 products in f32, and elements below the range of f16.
                        let within = unit * expected.abs() + 3e-5;
                        assert_near(&format!("{what} at {at}"), &[*got], &[expected], within);
                    }
                }
            }
        }
    }
}

/// Equal bits whatever the strides, and frozen inputs; one tensor may be all branches.
pub fn gated_sums_bits_and_constants(devices: &[Device]) {
    // NdArray adds strided columns in another order.
    case([2, 3, 40, 24], ALL).gives_the_same_bits(devices, 1e-6);
    case([2, 2, 9, 20], ALL).has_constants(devices, 0.0);
    case([2, 2, 9, 20], [true, true, false]).has_constants(devices, 0.0);
    let (x, gates) = (numbers(40, 216), numbers(43, 54));
    let both = |plain: &Device| [plain.clone(), plain.clone().autodiff()];
    for device in devices.iter().flat_map(both) {
        let x = tensor(&x, [1, 2, 9, 12], &device, DType::F32);
        let gates = tensor::<4>(&gates, [1, 2, 9, 3], &device, DType::F32);
        let (before, one) = (read(x.clone()), Some(x.clone()));
        let out = gated([one.clone(), one.clone(), one], gates.clone());
        let sum = (x.clone() * gates.sum_dim(3)).into_data();
        assert_close("one tensor as all branches", read(out), &to_f64(sum), 1e-6);
        read(x).assert_eq(&before, true);
    }
}

/// A gradient that the caller keeps is unchanged, although gradients with respect to branches may overwrite it otherwise.
pub fn gated_sums_keep_their_gradients(devices: &[Device]) {
    for plain in devices {
        let device = plain.clone().autodiff();
        let of = |seed, shape: [usize; 4]| {
            let values = numbers(seed, shape.iter().product());
            tensor(&values, shape, &device, DType::F32)
        };
        let (leaf, grad) = (of(41, [1, 2, 9, 12]).require_grad(), of(44, [1, 2, 9, 12]));
        let before = read(grad.clone().inner());
        let out = gated([None, Some(leaf.clone()), None], of(43, [1, 2, 9, 3]));
        let grads = (out * grad.clone()).sum().backward();
        assert!(leaf.grad(&grads).is_some());
        read(grad.inner()).assert_eq(&before, true);
    }
}

/// More elements than 32-bit indices reach, for a large GPU: the last rows are those of a small call.
pub fn gated_sums_of_more_than_2_31_elements(devices: &[Device]) {
    let (heads, seq, width, last) = (5, 1 << 22, 128, 40);
    let case = case([1, 1, last, width], [true, true, false]);
    for device in devices {
        let dtypes = [DType::BF16; 2];
        let expected = case.run_all(device, &dtypes);
        let device = device.clone().autodiff();
        let rows = |seed, width: usize| {
            let shape = [1, 1, last, width];
            tensor::<4>(&numbers(seed, last * width), shape, &device, dtypes[0])
        };
        // Zeros, with the small call's rows at the end.
        let large = |x: Tensor<4>| {
            let [.., rows, width] = x.dims();
            let zeros = Tensor::<4>::zeros([1, heads, seq, width], (&device, dtypes[0]));
            let at = [0..1, heads - 1..heads, seq - rows..seq, 0..width];
            zeros.slice_assign(at, x).detach().require_grad()
        };
        let leaves = [rows(43, BRANCHES), rows(40, width), rows(41, width)].map(large);
        let [gates, a, b] = leaves.clone();
        let out = gated([Some(a), Some(b), None], gates);
        assert!(out.shape().num_elements() > 1 << 31);
        let tail = |x: Tensor<4>| {
            let [_, heads, seq, width] = x.dims();
            x.slice([0..1, heads - 1..heads, seq - last..seq, 0..width])
        };
        let mut got = vec![read(tail(out.clone().inner()))];
        let grads = (tail(out) * rows(44, width)).sum().backward();
        got.extend(leaves.map(|x| read(tail(x.grad(&grads).unwrap()))));
        for (got, expected) in got.into_iter().zip(expected) {
            assert_eq!(got.as_bytes(), expected.unwrap().as_bytes());
        }
    }
}
