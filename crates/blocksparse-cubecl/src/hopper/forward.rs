//! The forward kernel: one cube per tile of queries, one warpgroup per 64 of its rows.
//!
//! ```text
//! TMA          K(0) V(0) K(1) V(1) …    boxes of `group` rows, gathered into `stages` buffers for K and for V
//! every warpgroup, per step j:
//!     s = q · K(j)ᵀ                     wgmma
//!     mask,  m' = max(m, s),  p = exp2(s − m'),  a = exp2(m − m'),  l = a · l + Σ p
//!     x = p · V(j)                      wgmma, p in registers
//!     o = a · o + x
//! ```
//!
//! Two cubes, or two warpgroups, share a multiprocessor and fill each other's gaps. With `overlap`, a warpgroup fills its own: it computes
//! `o += p · V(j − 1)` during the softmax of step j, and two such warpgroups alternate at the tensor cores. That needs more registers, and pays off if few
//! warps share a multiprocessor.
//!
//! With a threshold, a warpgroup skips the exponentials and the second product of a step if all its scores are below `m` by more than that. The values have
//! already been loaded. Steps cannot overlap then, because the next product is known too late.
//!
//! There is no producer warp. With 256 units each can have 255 registers, with 288 only 168, and CubeCL sets no bound on the cubes per multiprocessor,
//! without which ptxas ignores `setmaxnreg`. Instead, the boxes of a step are distributed over the warps, since each box takes a warp some thirty
//! instructions.

// Compile-time conditions stay separate from run-time ones, and kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::dropout::*;
use super::forward_loads::*;
use super::fp8::{Fp8Scales, TileScales, pack_weights};
use super::options::*;
use super::output::*;
use super::rows::*;
use super::softmax::*;
use super::step::*;
use super::tiles::Tile;
use crate::arch::sm90::*;
use crate::shared::addressing::{ForwardOutputs, Four, PlanWords, Qkv, Schedule, batch_of};
use crate::shared::own_rows::own_rows;
use crate::shared::score::{LOWEST_MAX, ScoreScalars};

/// `q`, `k` and `v` are tensor maps `[batch, heads, seq, dim]`, or with `residue` `[batch, heads, stride, seq / stride, dim]`. out is in vectors of eight
/// elements.
///
/// Weights are `p = exp2(s · log2_scale − …)`. With a softcap, first `s = softcap · tanh(x)` with `x = s · cap_scale / 2 log2 e`. `lse_scale` is
/// `log2 e / log2_scale`, the factor from the natural logarithm to scores. In FP8, `scales` are those of the tensors, times the factor of scores; maxima
/// are base-2 exponents, and `log2_scale` is 1. If biases are added to scores that are not softcapped, `cap_scale` is the scale.
#[cube(launch_unchecked)]
pub fn forward<S: Size, P: Size, O: Size>(
    inputs: Qkv<TensorMap<u32, Tiled>>,
    mut outputs: ForwardOutputs<Vector<u32, Four>, f32>,
    schedule: Schedule,
    args: ComptimeOption<PairArgs>,
    scales: ComptimeOption<Fp8Scales>,
    seq_q: u32,
    heads_per_kv: u32,
    lse_scale: f32,
    numbers: ScoreScalars,
    #[comptime] t: Tile,
) {
    let parts = &schedule.parts;
    let plan = &schedule.plan;
    let words = &plan.words[..];
    let slice = &schedule.slice;
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let (rank, nth_head) = if comptime!(t.heads_in_turn) {
        (CUBE_POS_Y, CUBE_POS_X)
    } else {
        (CUBE_POS_X, CUBE_POS_Y)
    };
    let head = slice.first_head as u32 + nth_head;
    let batch = batch_of(slice) as u32;

    init_barriers(base, head / heads_per_kv, t);
    let first_record = words[parts.heads + batch as usize * parts.batch + head as usize] as usize;
    let ranked = parts.order + (first_record + rank as usize) * 4;
    let tile = words[ranked];
    let record = ranked + 1;
    let steps = uniform(words[record + 1]);
    let rows = own_rows(parts, first_record, tile, comptime!(t.own_shape()));
    let loads = Loads {
        k: tensor_map_address(&inputs.k),
        v: tensor_map_address(&inputs.v),
        base,
        warp,
        lane,
        batch,
        class_len: plan.listing.class_len as u32,
        kept: unit_box(base, UNIT_POS_X, t),
    };
    let own = TileSteps {
        entry: parts.entries + words[record] as usize * comptime!(t.entry_words()),
        masks: parts.masks,
        steps,
        masked: uniform(words[record + 2]),
    };
    load_queries(tensor_map_address(&inputs.q), words, rows, head, &loads, t);
    let mut next = BoxPlaces { k: 0u32, v: 0u32 };
    if warp < comptime!(t.loading_warps()) {
        #[unroll]
        for j in 0..comptime!(t.stages as u32) {
            if j < steps {
                let at = entry_position(words, &own, &loads, j, t);
                load_step(&loads, j, at, false, t);
                load_step(&loads, j, at, true, t);
            }
        }
        next.k = entry_position(words, &own, &loads, comptime!(t.stages as u32), t);
    }

    let group = warp / 4;
    let operands = Operands {
        q: descriptor(
            base + comptime!(t.q_offset() as u32) + group * comptime!((64 * ROW) as u32),
            16usize,
        ),
        k: descriptor(base + comptime!(t.k_offset() as u32), 16usize),
        v: value_descriptor(base + comptime!(t.v_offset() as u32), t),
    };
    let mut sums = RowSums::<O> {
        m0: f32::new(LOWEST_MAX),
        m1: f32::new(LOWEST_MAX),
        l0: f32::new(0.0),
        l1: f32::new(0.0),
        o: Vector::<f32, O>::zeroed(),
        tops: RowTops::new(t),
    };
    let first = (batch * slice.heads as u32 + head) * seq_q;
    // In flight along with the queries.
    let before = read_before(&outputs, plan, rows, first, seq_q, t);
    let fp8 = if comptime!(t.fp8) {
        let kv_heads = slice.heads as u32 / heads_per_kv;
        ComptimeOption::new_Some(TileScales::new(
            scales.as_ref().unwrap(),
            plan,
            rows,
            batch * slice.heads as u32 + head,
            batch * kv_heads + head / heads_per_kv,
            t,
        ))
    } else {
        ComptimeOption::new_None()
    };
    let pairs = UnitPairs {
        of_head: options_of(&args, batch, head, t.base),
        rows: rows_of_unit(plan, rows, t.base),
        steps: own,
        fp8,
    };
    barrier_wait(base, 0u32);
    if comptime!(t.carry) {
        let factor = factor_of(&args, t.score);
        carry_on::<O>(&mut sums, &before, lse_scale, factor, lane, t);
    }
    if comptime!(t.turns()) {
        if group == 1 {
            named_arrive(1u32, 256u32);
        }
    }
    if steps > 0 {
        if comptime!(t.overlap) {
            overlapped::<S, P, O>(
                &mut sums, &mut next, &operands, &loads, plan, &args, &pairs, &numbers, t,
            );
        } else {
            one_by_one::<S, P, O>(
                &mut sums, &mut next, &operands, &loads, plan, &args, &pairs, &numbers, t,
            );
        }
    }

    let l0 = quad_sum(sums.l0);
    let l1 = quad_sum(sums.l1);
    let upper = row_of_unit(plan, rows, 0u32, seq_q, t);
    let lower = row_of_unit(plan, rows, ROW_PAIR, seq_q, t);
    let factor = factor_of(&args, t.score);
    let shape = comptime!(OutShape::of(&t));
    let log2_scale = numbers.log2_scale;
    let (top0, top1) = (sums.m0 * log2_scale, sums.m1 * log2_scale);
    let (out, lse) = (&mut outputs.out[..], &mut outputs.lse[..]);
    store_row::<O>(
        out, lse, &sums.o, 0usize, top0, l0, factor, first, &upper, shape,
    );
    store_row::<O>(
        out, lse, &sums.o, 2usize, top1, l1, factor, first, &lower, shape,
    );
    if comptime!(t.max_scores) {
        let mut max_scores = outputs.max_scores.unwrap();
        let tops = &sums.tops;
        tops.store(&mut max_scores[..], 0usize, first, &upper, log2_scale, t);
        tops.store(&mut max_scores[..], 1usize, first, &lower, log2_scale, t);
    }
}

/// Returns the descriptor of the first buffer of values.
#[cube]
fn value_descriptor(address: u32, #[comptime] t: Tile) -> u64 {
    if comptime!(t.fp8) {
        descriptor_of(address, 16usize, FP8_COLUMNS)
    } else {
        descriptor(address, comptime!(t.cols * ROW))
    }
}

/// Packs weights as the left operand of the second product.
#[cube]
fn weights_operand<S: Size, P: Size>(p: Vector<f32, S>, #[comptime] t: Tile) -> Vector<u32, P> {
    if comptime!(t.fp8) {
        pack_weights::<S, P>(p)
    } else {
        pack_all::<S, P>(p, t.half)
    }
}

/// Starts the second product, accumulating into `o`.
#[cube]
fn add_weighed<P: Size, O: Size>(
    o: Vector<f32, O>,
    p: Vector<u32, P>,
    v: u64,
    #[comptime] t: Tile,
) -> Vector<f32, O> {
    if comptime!(t.fp8) {
        accumulate_fp8::<P, O>(o, p, v, t.value_dim)
    } else {
        accumulate::<P, O>(o, p, v, t.half, t.value_dim)
    }
}

/// Descriptors of a warpgroup's queries, and of the first buffers of keys and of values.
#[derive(CubeType, Clone, Copy)]
struct Operands {
    q: u64,
    k: u64,
    v: u64,
}

/// Runs all steps, computing `o += p · V(j − 1)` during the softmax of step j.
#[cube]
fn overlapped<S: Size, P: Size, O: Size>(
    sums: &mut RowSums<O>,
    next: &mut BoxPlaces,
    operands: &Operands,
    loads: &Loads,
    plan: &PlanWords,
    args: &ComptimeOption<PairArgs>,
    pairs: &UnitPairs,
    numbers: &ScoreScalars,
    #[comptime] t: Tile,
) {
    let base = loads.base;
    let steps = pairs.steps.steps;
    let group = loads.warp / 4;
    let mut scales = first_scales(plan, pairs, t);
    let step = step_pairs(plan, args, pairs, &mut scales, 0u32, t);
    barrier_wait(base + comptime!(t.k_full()), 0u32);
    let s_started = product::<S>(operands.q, operands.k, comptime!(t.first_product()));
    let s = step_scores::<S>(
        s_started, 0usize, &step, 0u32, loads, plan, args, pairs, 0u32, numbers, t,
    );
    let soft = weights_of_scores::<S, O>(s, &step, &*sums, numbers, t);
    sums.take::<S>(&soft, t);
    if comptime!(t.carry) {
        sums.o = rescale::<O>(sums.o, soft.a0, soft.a1, t);
    }
    let weights = drop_out::<S>(soft.p, &step.kept, t.score);
    let mut p = weights_operand::<S, P>(weights, t);
    if steps > 1 {
        wait_keys(base, 1u32, t);
    }
    for j in 1..steps {
        let now = stage(j, t);
        let before = stage(j - 1, t);
        if comptime!(t.turns()) {
            named_sync(1 + group, 256u32);
        }
        let keys = buffer(operands.k, now, t);
        let s_started = product::<S>(operands.q, keys, comptime!(t.first_product()));
        wait_values(base, j - 1, t);
        let v_desc = values(operands.v, before, t);
        let o_started = add_weighed::<P, O>(sums.o, p, v_desc, t);
        if comptime!(t.turns()) {
            named_arrive(2 - group, 256u32);
        }
        load_later(next, loads, plan, &pairs.steps, j, t);
        let step = step_pairs(plan, args, pairs, &mut scales, j, t);
        let s = step_scores::<S>(
            s_started, 1usize, &step, now, loads, plan, args, pairs, j, numbers, t,
        );
        let soft = weights_of_scores::<S, O>(s, &step, &*sums, numbers, t);
        sums.take::<S>(&soft, t);
        // This also keeps ptxas from moving the next wait before the softmax.
        if j + 1 < steps {
            wait_keys(base, j + 1, t);
        }
        sums.o = wait::<O>(o_started, 0usize, comptime!(t.value_dim / 2));
        if loads.lane == 0 {
            barrier_arrive(base + comptime!(t.v_empty()) + before * 8);
        }
        sums.o = rescale::<O>(sums.o, soft.a0, soft.a1, t);
        let weights = drop_out::<S>(soft.p, &step.kept, t.score);
        p = weights_operand::<S, P>(weights, t);
    }
    wait_values(base, steps - 1, t);
    let v_desc = values(operands.v, stage(steps - 1, t), t);
    let o_started = add_weighed::<P, O>(sums.o, p, v_desc, t);
    sums.o = wait::<O>(o_started, 0usize, comptime!(t.value_dim / 2));
}

/// Runs all steps without overlap.
#[cube]
fn one_by_one<S: Size, P: Size, O: Size>(
    sums: &mut RowSums<O>,
    next: &mut BoxPlaces,
    operands: &Operands,
    loads: &Loads,
    plan: &PlanWords,
    args: &ComptimeOption<PairArgs>,
    pairs: &UnitPairs,
    numbers: &ScoreScalars,
    #[comptime] t: Tile,
) {
    let base = loads.base;
    let mut scales = first_scales(plan, pairs, t);
    for j in 0..pairs.steps.steps {
        let now = stage(j, t);
        wait_keys(base, j, t);
        let keys = buffer(operands.k, now, t);
        let s_started = product::<S>(operands.q, keys, comptime!(t.first_product()));
        load_later(next, loads, plan, &pairs.steps, j, t);
        let step = step_pairs(plan, args, pairs, &mut scales, j, t);
        let s = step_scores::<S>(
            s_started, 0usize, &step, now, loads, plan, args, pairs, j, numbers, t,
        );
        if sums.counts::<S>(s, &step, numbers, t) {
            let soft = weights_of_scores::<S, O>(s, &step, &*sums, numbers, t);
            sums.take::<S>(&soft, t);
            let weights = drop_out::<S>(soft.p, &step.kept, t.score);
            let p = weights_operand::<S, P>(weights, t);
            wait_values(base, j, t);
            let v_desc = values(operands.v, now, t);
            if comptime!(t.sums_apart()) {
                // Uses separate registers: with o as the accumulator, ptxas would move it out of the scores' way and back.
                let started = weigh::<P, O>(p, v_desc, t.half, t.value_dim);
                let x = wait::<O>(started, 0usize, comptime!(t.value_dim / 2));
                sums.o = add_scaled::<O>(sums.o, x, soft.a0, soft.a1, t.value_dim);
            } else {
                let o = rescale::<O>(sums.o, soft.a0, soft.a1, t);
                let started = add_weighed::<P, O>(o, p, v_desc, t);
                sums.o = wait::<O>(started, 0usize, comptime!(t.value_dim / 2));
            }
        } else {
            // A buffer must be full before it is refilled.
            wait_values(base, j, t);
        }
        if loads.lane == 0 {
            barrier_arrive(base + comptime!(t.v_empty()) + now * 8);
        }
    }
}

/// Outputs of an earlier part of the pattern in the unit's rows.
#[derive(CubeType)]
struct Before {
    log0: f32,
    log1: f32,
    fours: Array<Vector<u32, Four>>,
}

#[cube]
fn read_before(
    outputs: &ForwardOutputs<Vector<u32, Four>, f32>,
    plan: &PlanWords,
    rows: u32,
    first: u32,
    seq_q: u32,
    #[comptime] t: Tile,
) -> Before {
    let count = comptime!(t.value_dim.div_ceil(32));
    let mut fours = Array::<Vector<u32, Four>>::new(comptime!(2 * count));
    let mut log0 = f32::new(LOWEST_MAX);
    let mut log1 = f32::new(LOWEST_MAX);
    if comptime!(t.carry) {
        let upper = row_of_unit(plan, rows, 0u32, seq_q, t);
        let lower = row_of_unit(plan, rows, ROW_PAIR, seq_q, t);
        if upper.exists {
            log0 = outputs.lse[(first + upper.position) as usize];
        }
        if lower.exists {
            log1 = outputs.lse[(first + lower.position) as usize];
        }
        #[unroll]
        for i in 0..count {
            fours[i] = read_four(&outputs.out[..], &upper, first, i, t);
            fours[comptime!(count + i)] = read_four(&outputs.out[..], &lower, first, i, t);
        }
    }
    Before { log0, log1, fours }
}

/// Continues from the outputs of earlier parts. They equal a softmax state with maximum lse and sum 1, which one lane of four holds.
#[cube]
fn carry_on<O: Size>(
    sums: &mut RowSums<O>,
    before: &Before,
    lse_scale: f32,
    dropout_factor: f32,
    lane: u32,
    #[comptime] t: Tile,
) {
    sums.o = unpack_row::<O>(sums.o, &before.fours, 0usize, t);
    sums.o = unpack_row::<O>(sums.o, &before.fours, 1usize, t);
    if before.log0 > f32::new(LOWEST_MAX) {
        sums.m0 = before.log0 * lse_scale;
        sums.l0 = select(lane % 4 == 0, f32::new(1.0), f32::new(0.0));
    }
    if before.log1 > f32::new(LOWEST_MAX) {
        sums.m1 = before.log1 * lse_scale;
        sums.l1 = select(lane % 4 == 0, f32::new(1.0), f32::new(0.0));
    }
    if comptime!(t.score.dropout) {
        // The dropout factor is applied at the end.
        let all = reciprocal(dropout_factor);
        #[unroll]
        for i in 0..O::value() {
            let scaled = sums.o.extract(i) * all;
            sums.o.insert(i, scaled);
        }
    }
}
