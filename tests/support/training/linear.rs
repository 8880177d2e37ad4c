//! Products with weights and their gradients, against f64.

use burn::tensor::FloatDType;
use burn_fused_ops::{LinearOptions, fused_linear};

use crate::prelude::*;
use crate::training::case::*;

/// Batch entries, rows and width; and the columns of each weight.
type Lengths<'a> = ([usize; 3], &'a [usize]);

const CALLS: [Lengths<'_>; 9] = [
    ([1, 1, 1], &[1]),
    // A single row, for which calls without a backward pass have a kernel of their own.
    ([1, 1, 8], &[8]),
    ([3, 100, 130], &[33, 1, 20]),
    ([1, 300, 512], &[8]),
    ([1, 5000, 33], &[12]),
    // The rows of a weight's gradient in groups.
    ([4, 1024, 20], &[13, 4]),
    ([2, 0, 5], &[3, 2]),
    ([1, 30, 6], &[4, 0, 3]),
    ([1, 200, 64], &[128, 64, 8]),
];

/// Memory orders of weights.
pub const WAYS: [&str; 3] = ["contiguous", "with gaps", "transposed"];

pub fn lying(weight: Tensor<2>, way: &str) -> Tensor<2> {
    let [rows, columns] = weight.dims();
    match way {
        "contiguous" => weight,
        "with gaps" => {
            let beside = Tensor::zeros([rows, 24], (&weight.device(), weight.dtype()));
            Tensor::cat(vec![weight, beside], 1).narrow(1, 0, columns)
        }
        _ => stored_swapped(&weight, 0, 1),
    }
}

/// Makes a case, with dtypes of x, the weights and the result; the last is requested if it differs from x's.
pub fn case<'a>(([batch, rows, width], outs): Lengths<'a>, way: &'static str) -> Case<'a> {
    let all: usize = outs.iter().sum();
    let call = move |x: &mut Tensors| {
        let (rows, weights) = (
            x.take::<3>(),
            outs.iter().map(|_| lying(x.take(), way)).collect(),
        );
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
    let what = format!("{:?} to {outs:?}, {way}", [batch, rows, width]);
    let case = Case::new(what, call, judge)
        .input("x", 0, &[batch, rows, width], 1)
        .result("y", 2, &[batch, rows, all], 9);
    (outs.iter().zip(2..)).fold(case, |case, (&out, seed)| {
        case.input(&format!("W{}", seed - 1), 1, &[width, out], seed)
    })
}

/// One to three weights, rows in groups and not, no rows.
pub fn products_equal_f64(devices: &[Device]) {
    for lengths in some_of(CALLS, 2) {
        let case = case(lengths, WAYS[0]);
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
        check_products_in_halves(devices, || case(lengths, WAYS[0]));
    }
}

/// Equal results whatever the strides, and frozen inputs.
pub fn products_bits_and_constants(devices: &[Device]) {
    case(([2, 20, 33], &[20]), WAYS[0]).gives_the_same_bits(devices, products_within(devices));
    case(([1, 30, 6], &[4, 3, 5]), WAYS[0]).has_constants(devices, products_within(devices));
}

/// Memory orders of a factor: contiguous, transposed, heads of a projection, one matrix for the batch.
const FORMS: [&str; 4] = ["plain", "transposed", "heads", "one"];

fn factor(
    values: &[f64],
    form: &str,
    [outer, inner, rows, columns]: [usize; 4],
    on: (&Device, DType),
) -> Tensor<4> {
    let shaped = |shape: [usize; 4]| {
        let count = shape.iter().product();
        tensor::<4>(&values[..count], shape, on.0, on.1)
    };
    match form {
        "plain" => shaped([outer, inner, rows, columns]),
        "transposed" => shaped([outer, inner, columns, rows]).swap_dims(2, 3),
        "heads" => shaped([outer, rows, inner, columns]).swap_dims(1, 2),
        _ => shaped([1, 1, rows, columns]),
    }
}

/// Burn's own products, some of which `accelerate_matmul` takes over, with many shapes and strides. It must run first in its process.
pub fn accelerated_matmuls_equal_f64(devices: &[Device]) {
    #[cfg(feature = "fusion")]
    burn_fused_ops::accelerate_matmul().unwrap();
    let shapes = [
        [1, 1, 128, 64, 64],
        [2, 3, 128, 96, 72],
        [2, 4, 200, 136, 64],
        [3, 1, 64, 768, 256],
        [1, 1, 1, 64, 64],
        [2, 2, 130, 33, 65],
    ];
    // CPUs also round sums.
    for (device, dtype) in halves(devices).filter(|(device, _)| is_cuda(device)) {
        for [outer, inner, m, n, k] in some_of(shapes, shapes.len()) {
            let count = outer * inner * k * m.max(n);
            let values = [51, 52].map(|seed| numbers(seed, count));
            for (lhs, rhs) in FORMS.iter().flat_map(|lhs| FORMS.map(|rhs| (*lhs, rhs))) {
                let a = factor(&values[0], lhs, [outer, inner, m, k], (device, dtype));
                let b = factor(&values[1], rhs, [outer, inner, k, n], (device, dtype));
                // Read first: a tensor that is used once may be overwritten.
                let [x, y] = [&a, &b].map(|x| (x.dims(), to_f64(read(x.clone()))));
                let out = read(a.matmul(b));
                let heads = out.shape()[1];
                let what = format!("{device:?}, {dtype:?}, {lhs} [{m}, {k}] · {rhs} [{k}, {n}]");
                for (at, got) in to_f64(out).chunks(m * n).enumerate() {
                    let of = |(dims, values): &([usize; 4], Vec<f64>)| {
                        let [z, h] = [at / heads % dims[0], at % heads % dims[1]];
                        let count = dims[2] * dims[3];
                        values[(z * dims[1] + h) * count..][..count].to_vec()
                    };
                    let (x, y) = (of(&x), of(&y));
                    let sums = product([m, k, n], |r, i| x[r * k + i], |i, c| y[i * n + c]);
                    let sizes = |r: usize, i: usize| x[r * k + i].abs();
                    let sizes = product([m, k, n], sizes, |i, c| y[i * n + c].abs());
                    for ((got, sum), size) in got.iter().zip(sums).zip(sizes) {
                        let within = 1.01 * unit(dtype) * sum.abs() + size * 2f64.powi(-20) + 1e-6;
                        assert_near(&what, &[*got], &[sum], within);
                    }
                }
            }
        }
    }
    #[cfg(feature = "fusion")]
    println!(
        "{} products accelerated",
        burn_fused_ops::accelerated_products()
    );
}
