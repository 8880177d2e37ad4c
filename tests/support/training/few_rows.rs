//! Products of few rows without a backward pass, against f64: one to three weights in any memory order, to heads and from them.

use burn::tensor::FloatDType;
use burn_fused_ops::{Activation, LinearOptions, gated_linear, out_proj, qkv_proj};

use crate::prelude::*;
use crate::training::linear::{WAYS, case, lying};

/// Rows, depth, and the columns of each weight.
type Lengths = (usize, usize, &'static [usize]);

const LENGTHS: [Lengths; 10] = [
    (1, 8, &[8]),
    (1, 576, &[576, 192, 192]),
    (2, 136, &[72, 8]),
    (3, 4104, &[40]),
    (5, 64, &[1032]),
    (8, 1000, &[264, 128, 8]),
    // On tensor cores in half precision.
    (9, 64, &[64]),
    (30, 576, &[136, 64, 8]),
    (64, 264, &[40]),
    // Too many rows.
    (65, 64, &[64]),
];

/// `[rows, Σ columns]`.
fn expected(
    x: &[f64],
    weights: &[Vec<f64>],
    (rows, depth, outs): (usize, usize, &[usize]),
) -> Vec<f64> {
    let parts = weights.iter().zip(outs).map(|(weight, &out)| {
        product(
            [rows, depth, out],
            |r, k| x[r * depth + k],
            |k, c| weight[k * out + c],
        )
    });
    let parts: Vec<_> = parts.collect();
    let row = |r: usize| {
        let columns = parts.iter().zip(outs);
        columns.flat_map(move |(part, out)| part[r * out..][..*out].to_vec())
    };
    (0..rows).flat_map(row).collect()
}

/// Runs a check in every dtype of a device.
fn each(devices: &[Device], check: impl Fn(&Device, DType, f64)) {
    for (device, dtype, tolerance) in exact(devices) {
        check(device, dtype, product_tolerance(device, dtype, tolerance));
    }
    for (device, half) in halves(devices) {
        check(device, half, unit(half));
    }
}

/// Returns values that are exact in a dtype.
fn values(seed: u64, count: usize, dtype: DType) -> Vec<f64> {
    let mut values = numbers(seed, count);
    round_to(&mut values, dtype);
    values
}

pub fn few_rows_equal_f64(devices: &[Device]) {
    let rows = LENGTHS
        .into_iter()
        .flat_map(|row| WAYS.map(|way| (row, way)));
    for ((rows, depth, outs), way) in some_of(rows, 4) {
        each(devices, |device, dtype, tolerance| {
            let case = case(([1, rows, depth], outs), way);
            case.check_results(device, dtype, tolerance);
        });
    }
}

/// One token per sequence, like in decoding: with a bias, and widths at which no aligned slice of a buffer begins.
pub fn few_rows_by_heads_equal_f64(devices: &[Device]) {
    let (batch, depth, parts) = (3, 72, [(3, 24), (1, 24), (1, 24)]);
    let outs = [72, 24, 24];
    each(devices, |device, dtype, tolerance| {
        let x = values(760, batch * depth, dtype);
        let all: Vec<Vec<f64>> = (0..3)
            .map(|at| values(761 + at as u64, depth * outs[at], dtype))
            .collect();
        let bias = values(765, 120, dtype);
        let weights: Vec<Tensor<2>> = (all.iter().zip(outs))
            .map(|(values, out)| tensor(values, [depth, out], device, dtype))
            .collect();
        let rows = tensor(&x, [batch, 1, depth], device, dtype);
        let options = LinearOptions::default().dtype(FloatDType::from(dtype));
        for added in [false, true] {
            let b = added.then(|| tensor::<1>(&bias, [120], device, dtype));
            let got = qkv_proj(rows.clone(), weights.clone(), b, &parts, &options).unwrap();
            let mut start = 0;
            for (at, got) in got.into_iter().enumerate() {
                let mut expected = expected(
                    &x,
                    &all[at..at + 1],
                    (batch, depth, &[[72], [24], [24]][at]),
                );
                for (i, value) in expected.iter_mut().enumerate().filter(|_| added) {
                    *value += bias[start + i % outs[at]];
                }
                start += outs[at];
                let (heads, width) = parts[at];
                assert_eq!(got.dims(), [batch, heads, 1, width]);
                let what = format!("{device:?}, {dtype:?}, part {at}, bias {added}");
                assert_close(&what, read(got), &expected, 2.0 * tolerance);
            }
        }
        let heads = rows.reshape([batch, 3, 1, 24]);
        let got = read(out_proj(heads, weights[0].clone(), &options).unwrap());
        let expected = expected(&x, &all[..1], (batch, depth, &[72]));
        let what = format!("{device:?}, {dtype:?}, from heads");
        assert_close(&what, got, &expected, tolerance);
    });
}

/// Both weights of a gated unit in one pass, with rows for either kernel.
pub fn few_rows_with_a_gate_equal_f64(devices: &[Device]) {
    for (rows, depth, width) in [(1, 576, 1536), (7, 72, 40), (21, 1000, 264)] {
        each(devices, |device, dtype, tolerance| {
            let x = values(780, rows * depth, dtype);
            let all = [781, 782].map(|seed| values(seed, depth * width, dtype));
            let [gate, up] = (all.each_ref())
                .map(|values| lying(tensor(values, [depth, width], device, dtype), WAYS[1]));
            let x_rows = tensor::<2>(&x, [rows, depth], device, dtype);
            let options = LinearOptions::default();
            let got = read(gated_linear(x_rows, gate, up, Activation::Silu, &options).unwrap());
            let [gates, others] =
                all.map(|weight| expected(&x, &[weight], (rows, depth, &[width])));
            let active = gates
                .into_iter()
                .zip(others)
                .map(|(gate, other)| gate / (1.0 + (-gate).exp()) * other);
            let what = format!("{device:?}, {dtype:?}, {rows} × {depth} × {width}");
            assert_close(&what, got, &active.collect::<Vec<_>>(), 8.0 * tolerance);
        });
    }
}
