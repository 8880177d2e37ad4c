//! Dropout of the numbers of rows.

use cubecl::prelude::*;

use crate::StreamDropout;
use crate::kernels::shared::dropout::{Mask, MaskLaunch, words};
use crate::stream_dropout::STREAM;

/// The mask of a [`StreamDropout`], made again wherever it is needed.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct StreamMask {
    /// Key and threshold of the generator.
    pub mask: Mask,
    /// Which of a model's dropouts it is.
    pub site: u32,
    /// What numbers that are kept are multiplied by.
    pub factor: InputScalar,
}

/// The factors of the numbers of a vector, the first of which is at `column` of `row`: `factor` or 0.
#[cube]
pub fn stream_factors<A: Float, N: Size>(
    stream: &StreamMask,
    row: usize,
    column: usize,
) -> Vector<A, N> {
    let width = N::value();
    let factor = stream.factor.get::<A>();
    let last = usize::cast_from(u32::new(comptime!(STREAM as i64)));
    let site = stream.site as usize;
    let mut factors = Vector::<A, N>::zeroed();
    if comptime!(width >= 4) {
        #[unroll]
        for four in 0..comptime!(width / 4) {
            let words = words(&stream.mask, last, site, row, column / 4 + four);
            #[unroll]
            for i in 0..4usize {
                let kept = words[i] < stream.mask.threshold;
                factors.insert(comptime!(4 * four + i), select(kept, factor, A::new(0.0)));
            }
        }
    } else {
        // A vector that is narrower than four begins at a multiple of its width, so it has one counter.
        let words = words(&stream.mask, last, site, row, column / 4);
        #[unroll]
        for i in 0..width {
            let kept = words[column % 4 + i] < stream.mask.threshold;
            factors.insert(i, select(kept, factor, A::new(0.0)));
        }
    }
    factors
}

/// What a kernel gets of a dropout, or of none, with numbers in `accumulator`.
pub(super) fn stream_mask(
    dropout: Option<&StreamDropout>,
    accumulator: cubecl::ir::ElemType,
) -> StreamMaskLaunch {
    let dropout = dropout.copied().unwrap_or(StreamDropout::new(0.0, 0, 0));
    let mask = MaskLaunch::new(
        dropout.seed as u32,
        (dropout.seed >> 32) as u32,
        dropout.threshold(),
    );
    StreamMaskLaunch::new(
        mask,
        dropout.site,
        InputScalar::new(dropout.factor(), accumulator),
    )
}
