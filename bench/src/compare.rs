//! Reference computations and comparisons in f64.

use std::fmt::Display;

use anyhow::{Result, ensure};

pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    let pairs = a.iter().zip(b);
    pairs.map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}

/// Returns the softmax of scores and the logarithm of the sum of their exponentials, which is −∞ if there are none.
pub fn softmax(scores: &[f64]) -> (Vec<f64>, f64) {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights = scores.iter().map(|score| (score - top).exp());
    let whole: f64 = weights.clone().sum();
    let weights = weights.map(|weight| weight / whole).collect();
    (weights, top + whole.ln())
}

pub fn ensure_within(what: impl Display, got: f64, expected: f64, bound: f64) -> Result<()> {
    let error = (got - expected).abs();
    ensure!(
        error <= bound,
        "{what} is {got}, and {expected} in f64: {:.1} of the bound",
        error / bound
    );
    Ok(())
}

/// Checks that a product is the sum of its terms, within a relative rounding error of `rounding`.
pub fn ensure_sum(
    what: impl Display,
    got: f64,
    terms: impl Iterator<Item = f64>,
    rounding: f64,
) -> Result<()> {
    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + f64::abs(x)));
    // Sums are accumulated in f32, which tensor cores truncate.
    let bound = 1.01 * rounding * f64::abs(sum) + size * 2f64.powi(-21) + 1e-7;
    ensure_within(what, got, sum, bound)
}

/// # Errors
/// If a number is still NaN, so it was not written.
pub fn ensure_written(what: &str, numbers: &[f64]) -> Result<()> {
    let missing = numbers.iter().filter(|number| number.is_nan()).count();
    ensure!(missing == 0, "{missing} numbers of {what} were not written");
    Ok(())
}

/// Calls `make` twice, checks that the results are equal, and returns the result.
pub fn same_twice<T: PartialEq>(make: impl Fn() -> Result<T>) -> Result<T> {
    let made = make()?;
    ensure!(make()? == made, "other bits the second time");
    Ok(made)
}
