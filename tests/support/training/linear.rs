//! Products with weights and their gradients, against f64.

use burn::tensor::FloatDType;
use burn_fused_ops::{LinearOptions, fused_linear};

use crate::prelude::*;
use crate::training::case::*;

/// Rows of batch entries, width, and the columns of each weight.
type Lengths<'a> = ([usize; 3], &'a [usize]);

const CALLS: [Lengths<'_>; 8] = [
    ([1, 1, 1], &[1]),
    ([3, 100, 130], &[33, 1, 20]),
    ([1, 300, 512], &[8]),
    ([1, 5000, 33], &[12]),
    // The rows of a weight's gradient in groups.
    ([4, 1024, 20], &[13, 4]),
    ([2, 0, 5], &[3, 2]),
    ([1, 30, 6], &[4, 0, 3]),
    ([1, 200, 64], &[128, 64, 8]),
];

/// The dtypes of a case are those of x, the weights and the result, of which the last is asked for if it is another one than x's.
fn case(([batch, rows, width], outs): Lengths<'_>) -> Case<'_> {
    let all: usize = outs.iter().sum();
    let call = move |x: &mut Tensors| {
        let (rows, weights) = (x.take::<3>(), outs.iter().map(|_| x.take()).collect());
        let mut options = LinearOptions::default();
        options.dtype = (x.dtypes[0] != x.dtypes[2]).then(|| FloatDType::from(x.dtypes[2]));
        vec![fused_linear(rows, weights, &options).unwrap().into()]
    };
    let judge = move |x: &[Vec<f64>], grads: &[Vec<f64>]| {
        let (rows, grad) = (batch * rows, &grads[0]);
        let (mut y, mut dx) = (vec![0.0; rows * all], vec![0.0; rows * width]);
        let mut by_weights = Vec::new();
        let mut start = 0;
        for (weight, &out) in x[1..].iter().zip(outs) {
            let grad = |row: usize, column: usize| grad[row * all + start + column];
            let part = product(
                [rows, width, out],
                |r, k| x[0][r * width + k],
                |k, c| weight[k * out + c],
            );
            for row in 0..rows {
                y[row * all + start..][..out].copy_from_slice(&part[row * out..][..out]);
            }
            let part = product([rows, out, width], grad, |k, c| weight[c * out + k]);
            dx.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            let by_weight = product([width, rows, out], |i, r| x[0][r * width + i], grad);
            by_weights.push(by_weight);
            start += out;
        }
        [y, dx].into_iter().chain(by_weights).collect()
    };
    let what = format!("{:?} to {outs:?}", [batch, rows, width]);
    let case = Case::new(what, call, judge)
        .input(
            "x",
            0,
            &[batch, rows, width],
            numbers(1, batch * rows * width),
        )
        .result("y", 2, &[batch, rows, all], numbers(9, batch * rows * all));
    (outs.iter().zip(2..)).fold(case, |case, (&out, seed)| {
        case.input(
            &format!("W{}", seed - 1),
            1,
            &[width, out],
            numbers(seed, width * out),
        )
    })
}

/// One to three weights, rows in groups and not, no rows.
pub fn products_equal_f64(devices: &[Device]) {
    for lengths in CALLS {
        let case = case(lengths);
        for (device, dtype, tolerance) in exact(devices) {
            case.check_in(device, dtype, product_tolerance(device, dtype, tolerance));
        }
        case.gives_the_same_bits(devices, products_within(devices));
    }
}

/// Factors are rounded, sums are not: weights' gradients are f32, and x's if x is.
pub fn products_in_half_precision(devices: &[Device]) {
    let some: [Lengths<'_>; 4] = [
        ([1, 30, 6], &[4, 3, 5]),
        ([4, 1024, 20], &[13]),
        // Multiples of 8, which wgmma multiplies: several tiles with ragged ends, and a long sum.
        ([2, 150, 136], &[72, 264, 8]),
        ([4, 1024, 24], &[16]),
    ];
    for lengths in some {
        for (device, half) in halves(devices) {
            let rounding = if half == DType::BF16 { 4e-3 } else { 5e-4 };
            let case = case(lengths).rounded(half);
            for dtypes in [
                [DType::F32, DType::F32, half],
                [half, DType::F32, half],
                [half; 3],
            ] {
                // The result, the gradient by x, and those by weights.
                let of = |index: usize| dtypes[[2, 0, 1][index.min(2)]];
                let within = |index| if of(index) == half { rounding } else { 1e-5 };
                case.check(device, &dtypes, within);
            }
        }
    }
}

/// The same numbers whatever the strides, and frozen inputs.
pub fn products_bits_and_constants(devices: &[Device]) {
    case(([2, 20, 33], &[20])).gives_the_same_bits(devices, products_within(devices));
    case(([1, 30, 6], &[4, 3, 5])).has_constants(devices, products_within(devices));
}
