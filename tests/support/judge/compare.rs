//! The comparator: the largest error relative to the largest expected value, with its place; and each row's error in the 2-norm, relative to the
//! parts of the row ([`rounding`](crate::judge::rounding)).

use burn::tensor::kind::Basic;

use crate::gate;
use crate::judge::rounding::{Rounding, Spread};
use crate::prelude::*;

/// Inputs are of size 1, so smaller results are differences of larger terms (the gradient with respect to a single score is 1 − 1 = 0) and have an
/// absolute tolerance.
const SMALLEST_SCALE: f64 = 0.1;

/// Reads a tensor's present elements. `into_data` copies lazily from the device, at the first access, so it would include later in-place changes
/// (Burn 0.22.1).
pub fn read<const D: usize, K: Basic>(tensor: Tensor<D, K>) -> TensorData {
    let data = tensor.into_data();
    let _ = data.as_bytes();
    gate::note(&data);
    data
}

/// Returns the largest `|got − expected| / max |expected|`, and its index; infinite values must be equal.
pub fn relative_error(got: &[f64], expected: &[f64]) -> (f64, usize) {
    error_relative_to(0.0, got, expected)
}

/// [`relative_error`] for expected values that are differences of `terms`.
pub fn error_relative_to(terms: f64, got: &[f64], expected: &[f64]) -> (f64, usize) {
    assert_eq!(got.len(), expected.len(), "number of elements");
    let scale = (expected.iter())
        .filter(|x| x.is_finite())
        .fold(terms, |m, x| m.max(x.abs()))
        .max(SMALLEST_SCALE);
    let mut worst = (0.0, 0);
    for (index, (&g, &e)) in got.iter().zip(expected).enumerate() {
        let error = match g == e {
            true => 0.0,
            false if g.is_finite() && e.is_finite() => (g - e).abs() / scale,
            false => f64::INFINITY,
        };
        if error > worst.0 {
            worst = (error, index);
        }
    }
    worst
}

/// Panics, naming the worst coordinate, if the relative error exceeds `tolerance`.
pub fn assert_close(what: &str, got: TensorData, expected: &[f64], tolerance: f64) {
    assert_close_to(0.0, what, got, expected, tolerance);
}

/// [`assert_close`] for expected values that are differences of `terms`.
pub fn assert_close_to(terms: f64, what: &str, got: TensorData, expected: &[f64], tolerance: f64) {
    let shape = got.shape().clone();
    let got = to_f64(got);
    let (error, index) = error_relative_to(terms, &got, expected);
    if error <= tolerance || !gate::kernels_run() {
        return;
    }
    let at = coordinates(&shape, index);
    panic!(
        "{what}: relative error {error:.3e} > {tolerance:.1e} at {at:?}: got {}, expected {}",
        got[index], expected[index]
    );
}

fn coordinates(shape: &[usize], index: usize) -> Vec<usize> {
    let mut rest = index;
    let mut at: Vec<usize> = Vec::new();
    for &length in shape.iter().rev() {
        at.insert(0, rest % length);
        rest /= length;
    }
    at
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| (a - b).powi(2));
    squares.sum::<f64>().sqrt()
}

/// Returns the largest error of a row in the 2-norm relative to its bound in `dtype`, and the row.
pub fn worst_row(got: &[f64], expected: &[f64], rows: &[Spread], dtype: DType) -> (f64, usize) {
    assert_eq!(got.len(), expected.len(), "number of elements");
    let rounding = Rounding::of(dtype);
    let width = expected.len() / rows.len().max(1);
    let mut worst = (0.0, 0);
    for (row, spread) in rows.iter().enumerate() {
        let [got, expected] = [got, expected].map(|x| &x[row * width..][..width]);
        let error = distance(got, expected);
        let part = match error {
            0.0 => 0.0,
            error if error.is_finite() => error / rounding.bound(expected, *spread),
            _ => f64::INFINITY,
        };
        if part > worst.0 {
            worst = (part, row);
        }
    }
    worst
}

/// Panics, naming the worst row, if a row's error exceeds the bound of its roundings in `dtype`. Results without known parts (lse, largest scores),
/// which are of size 1 or larger, are compared by element.
pub fn assert_rows(what: &str, got: TensorData, expected: &Expected, dtype: DType) {
    let shape = got.shape().clone();
    let got = to_f64(got);
    if !gate::kernels_run() {
        return;
    }
    let values = expected.values;
    if expected.rows.is_empty() {
        let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
        assert_eq!(got.len(), values.len(), "number of elements");
        for (index, (g, e)) in got.iter().zip(values).enumerate() {
            let is_near = g == e || (g - e).abs() <= tolerance * e.abs().max(1.0);
            let at = coordinates(&shape, index);
            assert!(is_near, "{what}: got {g}, expected {e} at {at:?}");
        }
        return;
    }
    let (part, row) = worst_row(&got, values, expected.rows, dtype);
    if part <= 1.0 {
        return;
    }
    let width = values.len() / expected.rows.len();
    let [got, values] = [&got, values].map(|x| &x[row * width..][..width]);
    let norm = |x: &[f64]| dot(x, x).sqrt();
    panic!(
        "{what}: the row at {:?} errs by {:.3e} in the 2-norm, {part:.2} of what it may; its norm must be {:.3e}, got {:.3e}",
        coordinates(&shape, row * width),
        distance(got, values),
        norm(values),
        norm(got)
    );
}

pub fn to_f64(data: TensorData) -> Vec<f64> {
    gate::note(&data);
    data.convert::<f64>().to_vec().expect("converted to f64")
}

/// Panics if an absolute difference exceeds `tolerance`.
pub fn assert_near(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let is_near = (got - expected).abs() <= tolerance;
        assert!(is_near, "{what}, {at}: {got}, expected {expected}");
    }
}

/// Compares with printed numbers of four digits. The tolerance allows for numbers halfway between two.
pub fn assert_printed(what: &str, got: &[f64], printed: &[f64]) {
    assert_near(what, got, printed, 5.1e-5);
}
