//! What is added up of pairs, and what sums meet in the end.

use crate::kernels::indexer::pairs::PairSizes;

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
}
