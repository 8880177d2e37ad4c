//! How far roundings may move a row of a result: the row's own bound, beside the bound on a whole tensor.
//!
//! A bound on the largest error over the largest value of a tensor says little about small rows: in causal attention the gradient of the
//! last keys is a hundredth of the first ones', and a wrong one passes. So the judge also adds up, for each row of out, dq, dk and dv, the
//! variance of what roundings may do to it, to first order and with each rounding independent of the others:
//!
//! ```text
//! out[i] = Σ p v        p rounded before the product, out on write
//! dv[j]  = Σ p dO       p rounded, dv on write
//! dq[i]  = Σ ds k       ds = p (dO·v − delta) rounded, dq on write; delta = Σ dO out, of the out and of the p that were rounded
//! dk[j]  = Σ ds q       the same
//! ```
//!
//! A rounding of x to a dtype moves it by at most ε |x|, ε = 2⁻⁸ for bf16 and 2⁻¹¹ for f16, and by about 0.4 ε |x| on average over numbers. We
//! take ε |x| for the standard deviation of each and allow `TIMES` of them. So with `Σ² x = Σ ‖x‖²`,
//!
//! ```text
//! bound(row)² = (TIMES · ε)² (‖row‖² + Σ² of the rounded terms + Σ² of what delta's error adds) + (1e-5 of the row and its terms)²
//! ```
//!
//! The last summand is the arithmetic in f32 that everything else is done in, and for f32 and f64 inputs it is all there is (1e-5, 1e-12); its
//! terms are those whose differences scores' gradients are: p times the sizes of dO·v, delta, their own summands and the gradient of lse.
//!
//! Three cancellations are in the terms because they are in the arithmetic: a softcap's derivative is 1 − tanh², so its terms are those of
//! 1; with sinks the kernels compute attention without them, whose delta is larger by one over the share of a row that the sink leaves; and
//! weights below a ten-millionth, exponentials of large negative numbers, are held to an absolute error.
//!
//! Why it is tight and holds: `Problem::solve_rounded` makes those roundings in f64 arithmetic, which is what tensor-core kernels do but for
//! the order of sums (and roundings of p before the row's maximum is known, by the same ε). Over the table of cases and two seeds, on all rows, its
//! errors are at most 0.60 of the bound in either dtype (`simulated_roundings_stay_within_the_bound` holds them to 0.7, so that another order of
//! sums has room, and to at least 0.3, so that the bound stays tight).

use crate::prelude::*;

/// How many standard deviations of rounding a row may be off by.
const TIMES: f64 = 3.0;

/// What a dtype rounds by.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Relative, where inputs and results are rounded; 0 where they are in the dtype of the sums.
    unit: f64,
    /// Absolute, below the smallest normal number.
    least: f64,
    /// Of sums, relative to their terms.
    sums: f64,
    /// Absolute, of weights: those below a ten-millionth are the exponential of a large negative number, and nobody sees their error.
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

    /// The largest 2-norm of the error of a row, or of one number.
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

/// What a row is made of: squared 2-norms, summed over its terms.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spread {
    /// Terms whose differences the row is.
    pub terms: f64,
    /// Products of numbers that are rounded.
    pub rounded: f64,
    /// What a relative error of out in delta adds.
    pub delta: f64,
    /// What the rounded numbers are multiplied by, for numbers that are too small for their dtype.
    pub factors: f64,
}
