//! One comparator: the largest error relative to the largest expected value, and where it is.

use burn::tensor::TensorData;

/// Inputs are of size 1, so results smaller than this are differences of larger terms (the gradient of a
/// single score is 0 as 1 − 1) and are held to an absolute error.
const SMALLEST_SCALE: f64 = 0.1;

/// Largest `|got − expected| / max |expected|`; infinite values must agree exactly.
pub fn relative_error(got: &[f64], expected: &[f64]) -> (f64, usize) {
    error_relative_to(0.0, got, expected)
}

/// [`relative_error`] where the expected values are differences of `terms`.
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

/// Panics, naming the worst coordinate, if the relative error is above `tolerance`.
pub fn assert_close(what: &str, got: TensorData, expected: &[f64], tolerance: f64) {
    assert_close_to(0.0, what, got, expected, tolerance);
}

/// [`assert_close`] where the expected values are differences of `terms`.
pub fn assert_close_to(terms: f64, what: &str, got: TensorData, expected: &[f64], tolerance: f64) {
    let shape = got.shape().clone();
    let got = to_f64(got);
    let (error, index) = error_relative_to(terms, &got, expected);
    if error <= tolerance {
        return;
    }
    let mut rest = index;
    let mut at: Vec<usize> = Vec::new();
    for &length in shape.iter().rev() {
        at.insert(0, rest % length);
        rest /= length;
    }
    panic!(
        "{what}: relative error {error:.3e} > {tolerance:.1e} at {at:?}: got {}, expected {}",
        got[index], expected[index]
    );
}

pub fn to_f64(data: TensorData) -> Vec<f64> {
    data.convert::<f64>().to_vec().expect("converted to f64")
}
