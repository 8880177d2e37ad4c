//! Recomputation of a step's weights, and the gradients of its scores, in the backward kernels.

use cubecl::prelude::*;

use super::base::{Base, with_base};
use super::bits::*;
use super::dropout::drop_gradient;
use super::options::*;
use crate::arch::sm90::*;
use crate::shared::addressing::Four;
use crate::shared::score::ScoreScalars;

/// Compile-time parameters of a step's weights. If columns are queries, their stats are in shared memory.
#[derive(Clone, Copy)]
pub struct WeightShape {
    pub base: Base,
    /// Bytes between the stats of consecutive groups of eight columns.
    pub stats_eight: u32,
    /// Whether weights are passed in half precision.
    pub packed: bool,
}

with_base!(WeightShape);

/// lse and delta of the unit's two rows, if they are queries.
#[derive(CubeType, Clone, Copy)]
pub struct RowStats {
    pub lse0: f32,
    pub lse1: f32,
    pub delta0: f32,
    pub delta1: f32,
}

/// Returns zeros, for rows that are keys.
#[cube]
pub fn no_row_stats() -> RowStats {
    RowStats {
        lse0: f32::new(0.0),
        lse1: f32::new(0.0),
        delta0: f32::new(0.0),
        delta1: f32::new(0.0),
    }
}

/// Returns lse and delta of the unit's two columns in a group of eight: first column, then second.
#[cube]
fn column_stats(
    stats: u32,
    #[comptime] eight: usize,
    #[comptime] t: WeightShape,
) -> Vector<f32, Four> {
    let mut four = Vector::<f32, Four>::zeroed();
    if comptime!(t.columns()) {
        four = shared_load_four(stats + comptime!(eight as u32 * t.stats_eight));
    }
    four
}

/// Computes `p = exp2(s · log2_scale − lse)` for the blocks whose bits are set in `blocks`. `stats` is the address of the stats of columns.
#[cube]
pub fn weights_of<S: Size>(
    s: Vector<f32, S>,
    of_rows: &RowStats,
    stats: u32,
    blocks: u32,
    numbers: &ScoreScalars,
    #[comptime] t: WeightShape,
) -> Vector<f32, S> {
    let mut p = Vector::<f32, S>::zeroed();
    #[unroll]
    for eight in 0..comptime!(t.cols / 8) {
        let four = column_stats(stats, eight, t);
        #[unroll]
        for i in 0..4usize {
            let at = comptime!(4 * eight + i);
            let mut lse = if comptime!(i < 2) {
                of_rows.lse0
            } else {
                of_rows.lse1
            };
            if comptime!(t.columns()) {
                lse = four.extract(comptime!(i % 2 * 2));
            }
            let mut less = -lse;
            if comptime!(t.coarse.is_some()) {
                let its = keeps(blocks, comptime!(8 * eight / t.coarse.unwrap()));
                less = select(its, less, f32::new(f32::NEG_INFINITY));
            }
            let power = multiply_add(s.extract(at), numbers.log2_scale, less);
            p.insert(at, exp2(power));
        }
    }
    p
}

/// Whether any weight of the `units` units at a barrier is at least `exp(−threshold)`.
#[cube]
pub fn weights_count<S: Size>(
    p: &Vector<f32, S>,
    numbers: &ScoreScalars,
    barrier: u32,
    #[comptime] units: u32,
    #[comptime] t: WeightShape,
) -> bool {
    if comptime!(t.score.threshold) {
        let mut most = p.extract(0usize);
        #[unroll]
        for i in 1..S::value() {
            most = larger(most, p.extract(i));
        }
        let near = most >= exp2(-numbers.threshold.unwrap());
        named_any(barrier, near, units)
    } else {
        true.runtime()
    }
}

/// Computes `ds = p ∘ (dp − delta)`, with dropout for the `kept` pairs. The weights are in `packed` if the shape says so.
#[cube]
pub fn gradients_of_scores<S: Size, P: Size>(
    dp_in: Vector<f32, S>,
    p: &Vector<f32, S>,
    packed: &Vector<u32, P>,
    of_rows: &RowStats,
    stats: u32,
    kept: &Array<u32>,
    args: &ComptimeOption<PairArgs>,
    #[comptime] t: WeightShape,
) -> Vector<f32, S> {
    let mut ds = dp_in;
    #[unroll]
    for eight in 0..comptime!(t.cols / 8) {
        let four = column_stats(stats, eight, t);
        #[unroll]
        for i in 0..4usize {
            let at = comptime!(4 * eight + i);
            let mut delta = if comptime!(i < 2) {
                of_rows.delta0
            } else {
                of_rows.delta1
            };
            if comptime!(t.columns()) {
                delta = four.extract(comptime!(i % 2 * 2 + 1));
            }
            let weight = if comptime!(t.packed) {
                let two = packed.extract(comptime!(at / 2));
                unpack(two, comptime!(at % 2 == 1), t.half)
            } else {
                p.extract(at)
            };
            let dp = drop_gradient(ds.extract(at), delta, kept, args, at, t.score);
            ds.insert(at, weight * dp);
        }
    }
    ds
}
