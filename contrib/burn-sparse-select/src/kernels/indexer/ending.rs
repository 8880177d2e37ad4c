//! What heads give a pair, and what becomes of their sum, of products.

use cubecl::prelude::*;

use crate::kernels::indexer::wanted::Epilogue;
use blocksparse_cubecl::arch::ptx::exp2;

/// What becomes of sums.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Ending {
    /// What scores are multiplied by; or products, of an exponential to base 2.
    pub factor: f32,
    pub highest: f32,
    pub near: usize,
}

impl Epilogue {
    /// As kernels have it.
    pub(crate) fn ending(&self, is_weights: bool) -> EndingLaunch {
        let factor = match is_weights {
            true => self.factor * std::f64::consts::LOG2_E,
            false => self.factor,
        };
        EndingLaunch::new(factor as f32, self.highest, self.near)
    }
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
