//! Bound of the rounding error of a row of a result, besides the bound of a whole tensor.
//!
//! A bound of the largest error relative to the largest value of a tensor says little about small rows: in causal attention the gradients of the
//! last keys are a hundredth of those of the first, and wrong ones would pass. So for each row of out, dq, dk and dv the judge also adds up the
//! variance that roundings may cause, to first order and with independent roundings:
//!
//! ```text
//! out[i] = Σ p v        p rounded before the product, out on write
//! dv[j]  = Σ p dO       p rounded, dv on write
//! dq[i]  = Σ ds k       ds = p (dO·v − delta) rounded, dq on write; delta = Σ dO out, of the out and of the p that were rounded
//! dk[j]  = Σ ds q       the same
//! ```
//!
//! A rounding of x to a dtype moves it by at most ε |x|, ε = 2⁻⁸ for bf16 and 2⁻¹¹ for f16, and by about 0.4 ε |x| on average. We take ε |x| as the
//! standard deviation of each and allow `TIMES` of them. So with `Σ² x = Σ ‖x‖²`,
//!
//! ```text
//! bound(row)² = (TIMES · ε)² (‖row‖² + Σ² of the rounded terms + Σ² of what delta's error adds) + (1e-5 of the row and its terms)²
//! ```
//!
//! The last summand covers the f32 arithmetic of everything else, and is the only one for f32 and f64 inputs (1e-5, 1e-12). Its terms are those
//! whose differences are the gradients with respect to scores: p times the sizes of dO·v, delta, their own summands and the gradient with respect to
//! lse.
//!
//! The terms include three cancellations of the arithmetic. A softcap's derivative is 1 − tanh², so its terms are those of 1. With sinks the kernels
//! compute attention without them, whose delta is larger by one over the share of a row that the sink leaves. Weights below a ten-millionth,
//! exponentials of large negative numbers, have an absolute tolerance.
//!
//! The bound is valid and tight: `Problem::solve_rounded` makes those roundings in f64 arithmetic, like tensor-core kernels except for the order of
//! sums (and roundings of p before the row's maximum is known, by the same ε). Over the table of cases and two seeds, on all rows, its errors are at
//! most 0.60 of the bound in either dtype. `simulated_roundings_stay_within_the_bound` limits them to 0.7, so that other orders of sums fit, and
//! requires at least 0.3, so that the bound stays tight.

use crate::prelude::*;

/// Number of standard deviations of rounding that a row may be off by.
const TIMES: f64 = 3.0;

/// Rounding errors of a dtype.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Relative error of inputs and results; 0 if they are in the accumulation dtype.
    unit: f64,
    /// Absolute error below the smallest normal number.
    least: f64,
    /// Error of sums, relative to their terms.
    sums: f64,
    /// Absolute error of weights: those below a ten-millionth are exponentials of large negative numbers, and their error has no effect.
    underflow: f64,
}

impl Rounding {
    pub fn of(dtype: DType) -> Self {
        let (unit, least, sums, underflow) = match dtype {
            DType::BF16 => (2f64.powi(-8), 0.0, 1e-5, 1e-12),
            DType::F16 => (2f64.powi(-11), 2f64.powi(-25), 1e-5, 1e-12),
            DType::F64 => (0.0, 0.0, 1e-12, 1e-20),
            _ => (0.0, 0.0, 1e-5, 1e-12),
        };
        Self {
            unit,
            least,
            sums,
            underflow,
        }
    }

    /// Returns the bound of the 2-norm of the error of a row, or of one element.
    pub fn bound(&self, expected: &[f64], spread: Spread) -> f64 {
        let norm: f64 = expected.iter().map(|x| x * x).sum();
        let roundings = norm + spread.rounded + spread.delta;
        let count = expected.len() as f64;
        let half = (TIMES * self.unit).powi(2) * roundings
            + (TIMES * self.least).powi(2) * (count + spread.factors);
        let sums = self.sums * (norm.sqrt() + spread.terms.sqrt());
        half.sqrt() + sums + self.underflow * spread.factors.sqrt()
    }
}

/// Squared 2-norms of the parts of a row, summed over its terms.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread {
    /// Terms whose difference is the row.
    pub terms: f64,
    /// Products of rounded factors.
    pub rounded: f64,
    /// Effect of a relative error of out on delta.
    pub delta: f64,
    /// Factors of the rounded elements, for elements below the range of their dtype.
    pub factors: f64,
}
