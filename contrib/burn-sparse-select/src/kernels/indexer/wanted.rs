//! What is added up of pairs, and what sums meet in the end.

use cubecl::prelude::*;

use crate::kernels::indexer::pairs::PairSizes;
use blocksparse_cubecl::arch::ptx::exp2;

/// What is added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PairSum {
    /// `factor · Σ w · relu(q · k)`, and the highest number for so many keys up to a query's own; also of later keys, if `all` are wanted: otherwise their numbers
    /// say nothing, or are not written.
    Scores {
        /// What sums are multiplied by.
        factor: f64,
        /// Keys up to a query's own that have no score.
        near: usize,
        /// Whether later keys count.
        all: bool,
    },
    /// `Σ exp(scale · q · k − lse) / heads`, and 0 for keys behind a query's position.
    Weights {
        /// What products are multiplied by.
        scale: f64,
    },
}

/// What sums meet in the end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epilogue {
    /// What scores are multiplied by, or products.
    pub factor: f64,
    /// The number of near keys.
    pub highest: f32,
    pub near: usize,
}

impl Epilogue {
    pub fn new(sizes: &PairSizes, sum: &PairSum) -> Self {
        let (factor, near) = match sum {
            PairSum::Scores { factor, near, .. } => (*factor, *near),
            PairSum::Weights { scale } => (*scale, 0),
        };
        // No key is nearer than the one after the last.
        let near = near.min(sizes.seq[1]);
        let highest = match near {
            0 => 0.0,
            _ => f32::INFINITY,
        };
        Self {
            factor,
            highest,
            near,
        }
    }

    /// As kernels have it.
    pub(crate) fn ending(&self, is_weights: bool) -> EndingLaunch {
        let factor = match is_weights {
            true => self.factor * std::f64::consts::LOG2_E,
            false => self.factor,
        };
        EndingLaunch::new(factor as f32, self.highest, self.near)
    }
}

/// What becomes of sums.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Ending {
    /// What scores are multiplied by; or products, of an exponential to base 2.
    pub factor: f32,
    pub highest: f32,
    pub near: usize,
}

/// What a head gives a pair. What a row has of lse is in powers of 2 here.
#[cube]
pub(crate) fn term(
    product: f32,
    of_row: f32,
    ending: &Ending,
    #[comptime] is_weights: bool,
) -> f32 {
    if comptime!(is_weights) {
        exp2(product * ending.factor - of_row)
    } else {
        of_row * max(product, 0.0f32)
    }
}

/// The number of a pair whose heads give `sum`.
#[cube]
pub(crate) fn finished(
    sum: f32,
    key: i32,
    position: usize,
    heads: usize,
    ending: &Ending,
    #[comptime] is_weights: bool,
) -> f32 {
    if comptime!(is_weights) {
        let is_seen = key <= position as i32;
        select(is_seen, sum / f32::cast_from(heads), 0.0f32)
    } else {
        let near = ending.near;
        let is_near = near > 0 && key + near as i32 > position as i32;
        select(is_near, ending.highest, sum * ending.factor)
    }
}
