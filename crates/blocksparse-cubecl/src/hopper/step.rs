//! A step of the forward kernel: its scores, weights and sums.

// Compile-time conditions stay separate from run-time ones.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use super::bits::*;
use super::dropout::*;
use super::forward_loads::{Loads, TileSteps, entry_of};
use super::fp8::{ScalesAhead, TileScales};
use super::options::*;
use super::output::RowTops;
use super::rows::ROW_PAIR;
use super::softmax::*;
use super::tiles::Tile;
use crate::arch::sm90::*;
use crate::shared::addressing::PlanWords;
use crate::shared::score::ScoreScalars;

/// Inputs of a unit's scores besides products.
#[derive(CubeType, Clone, Copy)]
pub struct UnitPairs {
    pub of_head: HeadOptions,
    pub rows: UnitRows,
    pub steps: TileSteps,
    pub fp8: ComptimeOption<TileScales>,
}

/// Returns the scales of the first step, in FP8.
#[cube]
pub fn first_scales(
    plan: &PlanWords,
    pairs: &UnitPairs,
    #[comptime] t: Tile,
) -> ComptimeOption<ScalesAhead> {
    if comptime!(t.fp8) {
        let of = pairs.fp8.as_ref().unwrap();
        ComptimeOption::new_Some(ScalesAhead::new(of, plan, &pairs.steps, t))
    } else {
        ComptimeOption::new_None()
    }
}

/// Data of a step's pairs that does not depend on their scores.
#[derive(CubeType)]
pub struct StepPairs {
    /// Mask bits, if they are read early.
    bits: Array<u32>,
    /// Pairs that dropout keeps.
    pub kept: Array<u32>,
    /// Bits of a coarse entry: the blocks that the warp's rows attend to.
    blocks: u32,
    /// Factors of products, in FP8.
    factors: ComptimeOption<Array<f32>>,
}

#[cube]
pub fn step_pairs(
    plan: &PlanWords,
    args: &ComptimeOption<PairArgs>,
    pairs: &UnitPairs,
    scales: &mut ComptimeOption<ScalesAhead>,
    j: u32,
    #[comptime] t: Tile,
) -> StepPairs {
    let bits = mask_bits(&plan.words[..], &pairs.steps, j, t);
    let entry = entry_of(&pairs.steps, j, t);
    let kept = kept_pairs(args, &pairs.of_head, &pairs.rows, plan, entry, t.base);
    let blocks = kept_blocks(&plan.words[..], entry, t.base);
    let factors = if comptime!(t.fp8) {
        let (of, steps) = (pairs.fp8.as_ref().unwrap(), &pairs.steps);
        ComptimeOption::new_Some(scales.as_mut().unwrap().take(of, plan, steps, j, t))
    } else {
        ComptimeOption::new_None()
    };
    StepPairs {
        bits,
        kept,
        blocks,
        factors,
    }
}

/// Softmax state of a unit's two rows, with `l` over its own columns, and the weighted sum of values.
#[derive(CubeType)]
pub struct RowSums<O: Size> {
    pub m0: f32,
    pub m1: f32,
    pub l0: f32,
    pub l1: f32,
    pub o: Vector<f32, O>,
    pub tops: RowTops,
}

#[cube]
impl<O: Size> RowSums<O> {
    /// Takes over the maxima and sums of a step.
    pub fn take<S: Size>(&mut self, step: &Softmax<S>, #[comptime] t: Tile) {
        self.m0 = step.m0;
        self.m1 = step.m1;
        self.l0 = step.l0;
        self.l1 = step.l1;
        self.tops.raise(step.top0, step.top1, t);
    }

    /// Whether any score of the warpgroup's rows is within the threshold of its running maximum. The four warps must call it together.
    pub fn counts<S: Size>(
        &mut self,
        s: Vector<f32, S>,
        step: &StepPairs,
        numbers: &ScoreScalars,
        #[comptime] t: Tile,
    ) -> bool {
        if comptime!(t.score.threshold) {
            let x = largest_kept::<S>(s, step.blocks, comptime!(t.coarse_blocks()));
            let (top0, top1) = (quad_max(x.upper), quad_max(x.lower));
            self.tops.raise(top0, top1, t);
            let above = larger(top0 - self.m0, top1 - self.m1) * numbers.log2_scale;
            let near = above >= -numbers.threshold.unwrap();
            named_any(1 + uniform(unit() / 128), near, 128u32)
        } else {
            true.runtime()
        }
    }
}

/// Returns the scores of step `j`: softcapped, with biases, and −∞ where masked. Waits until at most `pending` products after `started` are unfinished.
/// Once the products are complete, marks the keys at `stage` as free.
#[cube]
pub fn step_scores<S: Size>(
    started: Vector<f32, S>,
    #[comptime] pending: usize,
    step: &StepPairs,
    stage: u32,
    loads: &Loads,
    plan: &PlanWords,
    args: &ComptimeOption<PairArgs>,
    pairs: &UnitPairs,
    j: u32,
    numbers: &ScoreScalars,
    #[comptime] t: Tile,
) -> Vector<f32, S> {
    let mut s = wait::<S>(started, pending, comptime!(t.cols / 2));
    if loads.lane == 0 {
        barrier_arrive(loads.base + comptime!(t.k_empty()) + stage * 8);
    }
    let capped = comptime!(t.score.softcap);
    cap::<S>(&mut s, numbers.softcap, numbers.cap_scale, capped);
    s = add_biases::<S>(
        s,
        numbers.cap_scale,
        args,
        &pairs.of_head,
        &pairs.rows,
        plan,
        entry_of(&pairs.steps, j, t),
        t.base,
    );
    if j < pairs.steps.masked {
        let infinity = f32::new(f32::NEG_INFINITY);
        #[unroll]
        for word in 0..comptime!(t.cols / 32) {
            let mut pair = MaskWords {
                upper: 0u32,
                lower: 0u32,
            };
            if comptime!(t.early_masks()) {
                pair.upper = step.bits[comptime!(2 * word)];
                pair.lower = step.bits[comptime!(2 * word + 1)];
            } else {
                let read = mask_words(&plan.words[..], &pairs.steps, j, word, t);
                pair.upper = read.upper;
                pair.lower = read.lower;
            }
            #[unroll]
            for i in 0..8usize {
                let bit = comptime!(1u32 << (i / 2 * 8 + i % 2));
                let at = comptime!(16 * word + i / 2 * 4 + i % 2);
                s.insert(at, select(pair.upper & bit != 0, s.extract(at), infinity));
                let at = comptime!(at + 2);
                s.insert(at, select(pair.lower & bit != 0, s.extract(at), infinity));
            }
        }
    }
    s
}

/// Returns the weights of a step's scores.
#[cube]
pub fn weights_of_scores<S: Size, O: Size>(
    s: Vector<f32, S>,
    step: &StepPairs,
    sums: &RowSums<O>,
    numbers: &ScoreScalars,
    #[comptime] t: Tile,
) -> Softmax<S> {
    let (m0, m1, l0, l1) = (sums.m0, sums.m1, sums.l0, sums.l1);
    if comptime!(t.fp8) {
        softmax_of_products::<S>(s, step.factors.as_ref().unwrap(), m0, m1, l0, l1)
    } else {
        let (scale, blocks) = (numbers.log2_scale, comptime!(t.coarse_blocks()));
        softmax::<S>(s, step.blocks, m0, m1, l0, l1, scale, blocks)
    }
}

/// Mask bits of 32 columns in the unit's two rows, of which bits 8i and 8i + 1 are the unit's.
#[derive(CubeType, Clone, Copy)]
pub struct MaskWords {
    pub upper: u32,
    pub lower: u32,
}

#[cube]
pub fn mask_words(
    plan: &[u32],
    own: &TileSteps,
    j: u32,
    #[comptime] word: usize,
    #[comptime] t: Tile,
) -> MaskWords {
    let unit = unit();
    let row = unit / 32 * 16 + unit % 32 / 4;
    let quad = unit % 4 * 2;
    let word_cols = comptime!(t.group.min(32));
    let row_words = comptime!(t.mask_words());
    let entry = entry_of(own, j, t);
    let mut upper = 0u32;
    let mut lower = 0u32;
    #[unroll]
    for piece in 0..comptime!(32 / word_cols) {
        let col = comptime!(word * 32 + piece * word_cols);
        let id = plan[entry + comptime!(col / t.group * t.entry_words() + 1)];
        let at = own.masks
            + (id * comptime!((t.rows() * row_words) as u32) + row * comptime!(row_words as u32))
                as usize
            + comptime!(col % t.group / 32);
        let shift = comptime!((piece * word_cols) as u32);
        upper |= plan[at] << shift;
        lower |= plan[at + comptime!(ROW_PAIR as usize * row_words)] << shift;
    }
    MaskWords {
        upper: upper >> quad,
        lower: lower >> quad,
    }
}

/// Returns the mask bits of step `j`, if it has a mask and masks are read early, before the scores.
#[cube]
fn mask_bits(plan: &[u32], own: &TileSteps, j: u32, #[comptime] t: Tile) -> Array<u32> {
    let mut bits = Array::<u32>::new(comptime!(t.cols / 16));
    if comptime!(t.early_masks()) {
        if j < own.masked {
            #[unroll]
            for word in 0..comptime!(t.cols / 32) {
                let pair = mask_words(plan, own, j, word, t);
                bits[comptime!(2 * word)] = pair.upper;
                bits[comptime!(2 * word + 1)] = pair.lower;
            }
        }
    }
    bits
}
