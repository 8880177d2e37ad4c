//! The forward kernel: one cube per tile of queries, one warpgroup per 64 rows of it.
//!
//! ```text
//! TMA          K(0) V(0) K(1) V(1) …    gathered boxes of `group` rows, into `stages` buffers each
//! every warpgroup, per step j:
//!     s = q · K(j)ᵀ                     wgmma
//!     mask,  m' = max(m, s),  p = exp2(s − m'),  a = exp2(m − m'),  l = a · l + Σ p
//!     x = p · V(j)                      wgmma, p in registers
//!     o = a · o + x
//! ```
//!
//! Two cubes, or two warpgroups, share a multiprocessor and fill each other's gaps. With `overlap` a warpgroup fills
//! its own: `o += p · V(j − 1)` is computed while the softmax of step j is; two such warpgroups take turns at
//! the tensor cores. That needs more registers, and pays where few warps share a multiprocessor.
//!
//! There is no producer warp: 256 units may have all 255 registers, 288 only 168, and CubeCL sets no bound on the
//! cubes per multiprocessor, without which ptxas ignores `setmaxnreg`. Instead the boxes of a step are dealt
//! to the warps, since each takes a warp some thirty instructions.

// What is known at compile time stays apart from what is not; kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::dropout::*;
use super::options::*;
use super::output::*;
use super::rows::*;
use super::softmax::*;
use super::tiles::Tile;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, Schedule, batch_of, head_of};
use crate::shared::score::{LOWEST_MAX, ScoreScalars};

/// `q`, `k`, `v` as maps `[batch, heads, seq, dim]`, with `residue` `[batch, heads, stride, seq / stride, dim]`; `out`
/// `[batch, heads, seq_q, value_dim]` in eights of elements and `lse` `[batch, heads, seq_q]` contiguous.
///
/// `p = exp2(s · log2_scale − …)`; with a softcap first `s = softcap · tanh(s)`, its argument being `s · cap_scale / 2 log2 e`.
/// `lse_scale` is `log2 e / log2_scale`: from the natural logarithm back to scores. Where biases are added to scores that are not softcapped,
/// `cap_scale` is the scale.
#[cube(launch_unchecked)]
pub fn forward<S: Size, P: Size, O: Size>(
    q: &TensorMap<u32, Tiled>,
    k: &TensorMap<u32, Tiled>,
    v: &TensorMap<u32, Tiled>,
    out: &mut [Vector<u32, Four>],
    lse: &mut [f32],
    max_scores: ComptimeOption<Box<[f32]>>,
    plan: &[u32],
    args: ComptimeOption<PairArgs>,
    schedule: Schedule,
    seq_q: u32,
    heads_per_kv: u32,
    lse_scale: f32,
    numbers: ScoreScalars,
    #[comptime] t: Tile,
) {
    let parts = schedule.parts;
    let listing = schedule.listing;
    let slice = schedule.slice;
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let head = head_of(&slice) as u32;
    let batch = batch_of(&slice) as u32;
    let stages = comptime!(t.stages as u32);

    if UNIT_POS_X == 0 {
        barrier_init(base, 1u32);
        #[unroll]
        for i in 0..stages {
            barrier_init(base + comptime!(t.k_full() + 8 * i), 1u32);
            barrier_init(base + comptime!(t.v_full() + 8 * i), 1u32);
            barrier_init(base + comptime!(t.k_empty() + 8 * i), comptime!(t.warps()));
            barrier_init(base + comptime!(t.v_empty() + 8 * i), comptime!(t.warps()));
        }
        barrier_fence();
        shared_store(base + comptime!(t.kv_head_offset()), head / heads_per_kv);
    }
    sync_cube();

    let first_record = plan[parts.heads + batch as usize * parts.batch + head as usize] as usize;
    let ranked = parts.order + (first_record + CUBE_POS_X as usize) * 4;
    let tile = plan[ranked];
    let record = ranked + 1;
    let steps = uniform(plan[record + 1]);
    let rows = own_rows(&parts, first_record, tile, comptime!(t.own_shape()));
    let loads = Loads {
        k: tensor_map_address(k),
        v: tensor_map_address(v),
        base,
        batch,
        class_len: listing.class_len as u32,
        kept: unit_box(base, UNIT_POS_X, t),
    };
    let own = TileSteps {
        entry: parts.entries + plan[record] as usize * comptime!(t.entry_words()),
        masks: parts.masks,
        steps,
        masked: uniform(plan[record + 2]),
    };
    if UNIT_POS_X == 0 {
        barrier_expect(base, comptime!(t.a_bytes()));
    }
    if UNIT_POS_X < comptime!(t.a_boxes() as u32) {
        let span = UNIT_POS_X % comptime!(t.spans() as u32);
        let row = UNIT_POS_X / comptime!(t.spans() as u32) * comptime!(t.a_group() as u32);
        load_at(
            tensor_map_address(q),
            base + comptime!(t.q_offset() as u32)
                + span * comptime!((t.rows() * ROW) as u32)
                + row * comptime!(ROW as u32),
            base,
            span,
            own_place(plan, rows, row, comptime!(t.own_shape())),
            loads.class_len,
            head,
            batch,
            comptime!(t.residue),
        );
    }
    // Where the box lies that this unit loads next of k; of v it is the one before.
    let mut k_at = 0u32;
    let mut v_at = 0u32;
    if warp < comptime!(t.loading_warps()) {
        #[unroll]
        for j in 0..stages {
            if j < steps {
                let at = entry_position(plan, &own, &loads, j, t);
                load_step(&loads, j, at, false, t);
                load_step(&loads, j, at, true, t);
            }
        }
        k_at = entry_position(plan, &own, &loads, stages, t);
    }

    let group = warp / 4;
    let q_desc = descriptor(
        base + comptime!(t.q_offset() as u32) + group * comptime!((64 * ROW) as u32),
        16usize,
    );
    let k_desc = descriptor(base + comptime!(t.k_offset() as u32), 16usize);
    let v_desc = descriptor(
        base + comptime!(t.v_offset() as u32),
        comptime!(t.cols * ROW),
    );
    let mut m0 = f32::new(LOWEST_MAX);
    let mut m1 = f32::new(LOWEST_MAX);
    let mut l0 = f32::new(0.0);
    let mut l1 = f32::new(0.0);
    let mut o = Vector::<f32, O>::zeroed();
    let mut tops = RowTops::new(t);
    let first = (batch * slice.heads as u32 + head) * seq_q;
    let fours = comptime!(t.value_dim.div_ceil(32));
    let mut before = Array::<Vector<u32, Four>>::new(comptime!(2 * fours));
    let mut log0 = f32::new(LOWEST_MAX);
    let mut log1 = f32::new(LOWEST_MAX);
    if comptime!(t.carry) {
        // On its way while the queries are.
        let upper = row_of_unit(plan, rows, 0u32, &listing, seq_q, t);
        let lower = row_of_unit(plan, rows, ROW_PAIR, &listing, seq_q, t);
        if upper.exists {
            log0 = lse[(first + upper.position) as usize];
        }
        if lower.exists {
            log1 = lse[(first + lower.position) as usize];
        }
        #[unroll]
        for i in 0..fours {
            before[i] = read_four(&out[..], &upper, first, i, t);
            before[comptime!(fours + i)] = read_four(&out[..], &lower, first, i, t);
        }
    }
    let of_head = options_of(&args, batch, head, comptime!(t.pairs()));
    let pairs = UnitPairs {
        of_head,
        rows: rows_of_unit(plan, rows, &listing, t),
    };
    barrier_wait(base, 0u32);
    if comptime!(t.carry) {
        // A finished part is a row of the softmax with maximum lse and sum 1, which one lane of four holds.
        o = unpack_row::<O>(o, &before, 0usize, t);
        o = unpack_row::<O>(o, &before, 1usize, t);
        if log0 > f32::new(LOWEST_MAX) {
            m0 = log0 * lse_scale;
            l0 = select(lane % 4 == 0, f32::new(1.0), f32::new(0.0));
        }
        if log1 > f32::new(LOWEST_MAX) {
            m1 = log1 * lse_scale;
            l1 = select(lane % 4 == 0, f32::new(1.0), f32::new(0.0));
        }
        if comptime!(t.options.score.dropout) {
            // The factor of what is kept comes in the end.
            let all = reciprocal(factor_of(&args, comptime!(t.options)));
            #[unroll]
            for i in 0..O::value() {
                o.insert(i, o.extract(i) * all);
            }
        }
    }
    if comptime!(t.turns()) {
        if group == 1 {
            named_arrive(1u32, 256u32);
        }
    }

    if steps > 0 {
        if comptime!(t.overlap) {
            let step = step_pairs(plan, &args, &pairs, &own, 0u32, &listing, t);
            barrier_wait(base + comptime!(t.k_full()), 0u32);
            let s_started = product::<S>(q_desc, k_desc, comptime!(t.scores(t.dim)));
            let soft = step_weights::<S>(
                s_started, 0usize, &step, 0u32, plan, &args, &pairs, &listing, &own, 0u32, base,
                lane, m0, m1, l0, l1, &numbers, t,
            );
            m0 = soft.m0;
            m1 = soft.m1;
            l0 = soft.l0;
            l1 = soft.l1;
            tops.raise(soft.top0, soft.top1, t);
            if comptime!(t.carry) {
                o = rescale::<O>(o, soft.a0, soft.a1, t);
            }
            let weights = drop_out::<S>(soft.p, &step.kept, comptime!(t.options));
            let mut p = pack_all::<S, P>(weights, t.half);
            if steps > 1 {
                barrier_wait(
                    base + comptime!(t.k_full()) + stage(1u32, t) * 8,
                    parity(1u32, t),
                );
            }
            for j in 1..steps {
                let now = stage(j, t);
                let before = stage(j - 1, t);
                if comptime!(t.turns()) {
                    named_sync(1 + group, 256u32);
                }
                let s_started =
                    product::<S>(q_desc, buffer(k_desc, now, t), comptime!(t.scores(t.dim)));
                barrier_wait(base + comptime!(t.v_full()) + before * 8, parity(j - 1, t));
                let v_desc = values(v_desc, before, t);
                let o_started = accumulate::<P, O>(o, p, v_desc, t.half, t.value_dim);
                if comptime!(t.turns()) {
                    named_arrive(2 - group, 256u32);
                }
                if warp < comptime!(t.loading_warps()) && j >= comptime!(t.lag as u32) {
                    let k_next = j + comptime!((t.stages - t.lag) as u32);
                    let v_next = k_next - 1;
                    if v_next >= stages && v_next < steps {
                        barrier_wait(
                            base + comptime!(t.v_empty()) + stage(v_next, t) * 8,
                            1 - parity(v_next, t),
                        );
                        load_step(&loads, v_next, v_at, true, t);
                    }
                    if k_next < steps {
                        barrier_wait(
                            base + comptime!(t.k_empty()) + stage(k_next, t) * 8,
                            1 - parity(k_next, t),
                        );
                        load_step(&loads, k_next, k_at, false, t);
                    }
                    v_at = k_at;
                    k_at = entry_position(plan, &own, &loads, k_next + 1, t);
                }
                let step = step_pairs(plan, &args, &pairs, &own, j, &listing, t);
                let soft = step_weights::<S>(
                    s_started, 1usize, &step, now, plan, &args, &pairs, &listing, &own, j, base,
                    lane, m0, m1, l0, l1, &numbers, t,
                );
                m0 = soft.m0;
                m1 = soft.m1;
                l0 = soft.l0;
                l1 = soft.l1;
                tops.raise(soft.top0, soft.top1, t);
                // Also keeps ptxas from moving the next wait in front of the softmax.
                if j + 1 < steps {
                    barrier_wait(
                        base + comptime!(t.k_full()) + stage(j + 1, t) * 8,
                        parity(j + 1, t),
                    );
                }
                o = wait::<O>(o_started, 0usize, comptime!(t.value_dim / 2));
                if lane == 0 {
                    barrier_arrive(base + comptime!(t.v_empty()) + before * 8);
                }
                o = rescale::<O>(o, soft.a0, soft.a1, t);
                let weights = drop_out::<S>(soft.p, &step.kept, comptime!(t.options));
                p = pack_all::<S, P>(weights, t.half);
            }
            let last = stage(steps - 1, t);
            barrier_wait(
                base + comptime!(t.v_full()) + last * 8,
                parity(steps - 1, t),
            );
            let v_desc = values(v_desc, last, t);
            let o_started = accumulate::<P, O>(o, p, v_desc, t.half, t.value_dim);
            o = wait::<O>(o_started, 0usize, comptime!(t.value_dim / 2));
        } else {
            for j in 0..steps {
                let now = stage(j, t);
                barrier_wait(base + comptime!(t.k_full()) + now * 8, parity(j, t));
                let s_started =
                    product::<S>(q_desc, buffer(k_desc, now, t), comptime!(t.scores(t.dim)));
                if warp < comptime!(t.loading_warps()) && j >= comptime!(t.lag as u32) {
                    let next = j + comptime!((t.stages - t.lag) as u32);
                    if next < steps {
                        let free = 1 - parity(next, t);
                        barrier_wait(base + comptime!(t.k_empty()) + stage(next, t) * 8, free);
                        load_step(&loads, next, k_at, false, t);
                        barrier_wait(base + comptime!(t.v_empty()) + stage(next, t) * 8, free);
                        load_step(&loads, next, k_at, true, t);
                    }
                    k_at = entry_position(plan, &own, &loads, next + 1, t);
                }
                let step = step_pairs(plan, &args, &pairs, &own, j, &listing, t);
                let soft = step_weights::<S>(
                    s_started, 0usize, &step, now, plan, &args, &pairs, &listing, &own, j, base,
                    lane, m0, m1, l0, l1, &numbers, t,
                );
                m0 = soft.m0;
                m1 = soft.m1;
                l0 = soft.l0;
                l1 = soft.l1;
                tops.raise(soft.top0, soft.top1, t);
                let weights = drop_out::<S>(soft.p, &step.kept, comptime!(t.options));
                let p = pack_all::<S, P>(weights, t.half);
                barrier_wait(base + comptime!(t.v_full()) + now * 8, parity(j, t));
                // Into registers of its own: as an accumulator, ptxas would move o out of the scores' way and back.
                let v_desc = values(v_desc, now, t);
                let started = weigh::<P, O>(p, v_desc, t.half, t.value_dim);
                let x = wait::<O>(started, 0usize, comptime!(t.value_dim / 2));
                o = add_scaled::<O>(o, x, soft.a0, soft.a1, t.value_dim);
                if lane == 0 {
                    barrier_arrive(base + comptime!(t.v_empty()) + now * 8);
                }
            }
        }
    }

    let l0 = quad_sum(l0);
    let l1 = quad_sum(l1);
    let upper = row_of_unit(plan, rows, 0u32, &listing, seq_q, t);
    let lower = row_of_unit(plan, rows, ROW_PAIR, &listing, seq_q, t);
    let factor = factor_of(&args, comptime!(t.options));
    let shape = comptime!(OutShape::of(&t));
    let (top0, top1) = (m0 * numbers.log2_scale, m1 * numbers.log2_scale);
    store_row::<O>(out, lse, &o, 0usize, top0, l0, factor, first, &upper, shape);
    store_row::<O>(out, lse, &o, 2usize, top1, l1, factor, first, &lower, shape);
    if comptime!(t.max_scores) {
        let mut max_scores = max_scores.unwrap();
        tops.store(
            &mut max_scores[..],
            0usize,
            first,
            &upper,
            numbers.log2_scale,
            t,
        );
        tops.store(
            &mut max_scores[..],
            1usize,
            first,
            &lower,
            numbers.log2_scale,
            t,
        );
    }
}

/// What loads are made of.
#[derive(CubeType, Clone, Copy)]
struct Loads {
    k: u64,
    v: u64,
    base: u32,
    batch: u32,
    class_len: u32,
    kept: UnitBox,
}

/// The box of each step that a unit loads: boxes are dealt to the warps, and within a warp to its lanes.
#[derive(CubeType, Clone, Copy)]
struct UnitBox {
    /// Whether the unit announces the bytes of a step.
    announces: bool,
    /// Whether the unit has a box.
    active: bool,
    /// The entry of the step that says where the box is,
    entry: u32,
    /// its span of 64 columns,
    span: u32,
    /// and its head.
    head: u32,
}

#[cube]
fn unit_box(base: u32, unit: u32, #[comptime] t: Tile) -> UnitBox {
    let lane = unit % 32;
    let index = unit / 32 + lane * comptime!(t.warps());
    UnitBox {
        announces: unit == 0,
        active: index < comptime!(t.boxes() as u32) && lane < comptime!(t.lane_boxes() as u32),
        entry: index / comptime!(t.spans() as u32),
        span: index % comptime!(t.spans() as u32),
        head: shared_load(base + comptime!(t.kv_head_offset())),
    }
}

/// The unit's box, kept in registers where there are enough of them, and else made anew.
#[cube]
fn box_of(loads: &Loads, #[comptime] t: Tile) -> UnitBox {
    if comptime!(t.overlap) {
        UnitBox {
            announces: loads.kept.announces,
            active: loads.kept.active,
            entry: loads.kept.entry,
            span: loads.kept.span,
            head: loads.kept.head,
        }
    } else {
        unit_box(loads.base, unit(), t)
    }
}

/// The buffer of step `j`.
#[cube]
fn stage(j: u32, #[comptime] t: Tile) -> u32 {
    j % comptime!(t.stages as u32)
}

/// The parity of the phase in which the buffer of step `j` becomes full.
#[cube]
fn parity(j: u32, #[comptime] t: Tile) -> u32 {
    (j / comptime!(t.stages as u32)) & 1
}

/// The descriptor of a buffer of keys, from that of the first one.
#[cube]
fn buffer(first: u64, stage: u32, #[comptime] t: Tile) -> u64 {
    first + u64::cast_from(stage * comptime!((t.stage_bytes() >> 4) as u32))
}

/// That of a buffer of values.
#[cube]
fn values(first: u64, stage: u32, #[comptime] t: Tile) -> u64 {
    first + u64::cast_from(stage * comptime!((t.value_bytes() >> 4) as u32))
}

/// The place of this unit's box of step `j`.
#[cube]
fn entry_position(
    plan: &[u32],
    own: &TileSteps,
    loads: &Loads,
    j: u32,
    #[comptime] t: Tile,
) -> u32 {
    let its = box_of(loads, t);
    let mut at = 0u32;
    if j < own.steps && its.active {
        let entry = j * comptime!(t.entries() as u32) + its.entry;
        let word = own.entry + (entry * comptime!(t.entry_words() as u32)) as usize;
        at = plan[word] * comptime!(t.group as u32);
    }
    at
}

/// Loads this unit's box of the keys or values of step `j`.
#[cube]
fn load_step(loads: &Loads, j: u32, at: u32, #[comptime] values: bool, #[comptime] t: Tile) {
    let its = box_of(loads, t);
    let stage = stage(j, t);
    let full = comptime!(if values { t.v_full() } else { t.k_full() });
    let offset = comptime!((if values { t.v_offset() } else { t.k_offset() }) as u32);
    let bytes = comptime!(if values {
        t.value_bytes()
    } else {
        t.stage_bytes()
    });
    let bar = loads.base + full + stage * 8;
    let mut map = loads.k;
    let mut active = its.active;
    if comptime!(values) {
        map = loads.v;
        // Values may have fewer spans than keys.
        if comptime!(t.value_spans() < t.spans()) {
            active = active && its.span < comptime!(t.value_spans() as u32);
        }
    }
    // Bytes may arrive before they are announced: the phase cannot end without the announcement.
    if its.announces {
        barrier_expect(bar, bytes);
    }
    if active {
        let target = loads.base
            + offset
            + stage * comptime!(bytes as u32)
            + its.span * comptime!((t.cols * ROW) as u32)
            + its.entry * comptime!((t.group * ROW) as u32);
        load_at(
            map,
            target,
            bar,
            its.span,
            at,
            loads.class_len,
            its.head,
            loads.batch,
            comptime!(t.residue),
        );
    }
}
