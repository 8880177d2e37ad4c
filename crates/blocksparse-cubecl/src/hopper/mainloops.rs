//! The backward pass in two launches of one kernel: dQ by a loop over rows, and dK and dV by a loop over columns. It has one cube per tile and one
//! warpgroup per 64 of its rows.
//!
//! ```text
//!            a1  a2   b1  b2        s  = a1 · b1ᵀ      p  = exp2(s · log2_scale − lse)
//! rows       q   dO   k   v         dp = a2 · b2ᵀ      ds = p ∘ (dp − delta)
//! columns    k   v    q   dO        out1 += ds · b1    out2 += p · b2   (columns only)
//!
//! all warps  TMA:  b1, b2, stats of step j + stages − lag     gathered boxes of `group` rows
//! every warpgroup, per step j:
//!     s, dp            wgmma, both started
//!     s done:          p, as a left operand in registers, while dp is computed
//!     out2 += p · b2   wgmma, started
//!     dp done:         ds, as a left operand in registers
//!     out1 += ds · b1  wgmma
//! ```
//!
//! With a threshold, dp starts after p, and only if a weight of the warpgroup is at least `exp(−threshold)`. Otherwise the step ends there.
//!
//! p and ds are left operands in registers, and never go through shared memory. In a loop over columns, s, p, dp and ds are transposed, and lse and delta
//! belong to columns, so TMA loads them with the step. `out1 · scale` is dQ or dK, and out2 is dV.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::dropout::*;
use super::gradient::mask;
use super::long_tiles::*;
use super::mainloop_cube::*;
use super::mainloop_loads::MainloopLengths;
use super::options::*;
use super::rows::{own_places, pack_all};
use super::score_gradient::*;
use super::tiles::MainloopTile;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, Listing, MainloopOperands, Schedule};
use crate::shared::score::ScoreScalars;

/// `operands` are tensor maps `[batch, heads, seq, dim]`, or with `residue` `[batch, heads, stride, seq / stride, dim]`. `stats` is
/// `[batch · heads, pitch, 2]`: `lse · log2 e` and delta of the query at each place, as a map and as a buffer. `out` is `[batch, heads, len, dim]` in
/// vectors of eight elements, with out2 from vector `second` on, or with `bias_sums` `[batch, query heads, len]` in f32. With `carry`, the results are
/// added to it. If cubes share tiles, their sums go to `shares`: see [`long_tiles`](super::long_tiles). If biases are added to scores that are not
/// softcapped, `cap_scale` is the scale.
#[cube(launch_unchecked)]
pub fn one_mainloop<S: Size, P: Size, O: Size>(
    operands: MainloopOperands<TensorMap<u32, Tiled>>,
    stats_map: &TensorMap<f32, Tiled>,
    stats: &[f32],
    out: &mut [Vector<u32, Four>],
    schedule: Schedule,
    args: ComptimeOption<PairArgs>,
    shares: ComptimeOption<TileShares>,
    lengths: MainloopLengths,
    numbers: ScoreScalars,
    #[comptime] t: MainloopTile,
) {
    let columns = comptime!(t.columns());
    let weights = comptime!(t.weights());
    let skips = comptime!(t.score.threshold);
    let plan = &schedule.plan;
    let listing = &plan.listing;
    let heads_per_kv = lengths.heads_per_kv;
    let cube = begin(&operands, stats_map, &shares, &schedule, heads_per_kv, t);
    let (base, lane) = (cube.base, cube.lane);

    let group = cube.warp / 4;
    let row = cube.warp * 16 + lane / 4;
    let group_rows = group * comptime!((64 * ROW) as u32);
    let a1_desc = descriptor(base + comptime!(t.a1_offset() as u32) + group_rows, 16usize);
    let a2_desc = descriptor(base + comptime!(t.a2_offset() as u32) + group_rows, 16usize);
    let b1_address = base + comptime!(t.b1_offset() as u32);
    let b2_address = base + comptime!(t.b2_offset() as u32);
    // The same bytes are K-major for s and dp, and MN-major for the outputs.
    let b1_desc = descriptor(b1_address, 16usize);
    let b2_desc = descriptor(b2_address, 16usize);
    let b1_wide = descriptor(b1_address, comptime!(t.cols * ROW));
    let b2_wide = descriptor(b2_address, comptime!(t.cols * ROW));

    // Stats of the unit's rows `row` and `row + 8`.
    let mut of_rows = no_row_stats();
    let places = own_places(&plan.words[..], cube.rows_at, row, comptime!(t.own_shape()));
    if comptime!(!columns) {
        let first = (cube.batch * cube.heads.all + cube.outer) * lengths.pitch;
        if places.upper < lengths.pitch {
            let at = (first + places.upper) as usize * 2;
            of_rows.lse0 = stats[at];
            of_rows.delta0 = stats[at + 1];
        }
        if places.lower < lengths.pitch {
            let at = (first + places.lower) as usize * 2;
            of_rows.lse1 = stats[at];
            of_rows.delta1 = stats[at + 1];
        }
    }
    let rows = unit_rows(places.upper, places.lower, listing, t.base);
    let mut out1 = Vector::<f32, O>::zeroed();
    let mut out2 = Vector::<f32, O>::zeroed();
    // Sums of the gradients of scores over the queries, for each of the unit's two rows.
    let mut sum0 = f32::new(0.0);
    let mut sum1 = f32::new(0.0);
    let mut done = 0u32;
    // Steps of other cubes before the first of this one.
    let mut before = cube.stretch.first;
    barrier_wait(base, 0u32);
    for turn in 0..cube.heads.turns {
        let turn = turn_of(&cube, &schedule, &args, turn, before, done, t);
        before -= turn.steps.first;
        for j in turn.steps.first..turn.steps.end {
            let stage = done % comptime!(t.stages as u32);
            let parity = (done / comptime!(t.stages as u32)) & 1;
            let offset = u64::cast_from(stage * comptime!((t.b_bytes() >> 4) as u32));
            barrier_wait(base + comptime!(t.full()) + stage * 8, parity);
            let s_started = product::<S>(a1_desc, b1_desc + offset, comptime!(t.scores(t.dim)));
            let scores = comptime!(t.scores(t.value_dim));
            let mut dp_started = Vector::<f32, S>::zeroed();
            if comptime!(!skips) {
                dp_started = product::<S>(a2_desc, b2_desc + offset, scores);
            }
            cube.load(&schedule, t);
            let entry = turn.entry + (j * comptime!(t.entries() as u32 * 2)) as usize;
            let kept = kept_pairs(&args, &turn.of_head, &rows, plan, entry, t.base);
            let width = S::value();
            let mut s = wait::<S>(s_started, comptime!(usize::from(!skips)), width);
            let is_capped = comptime!(t.score.softcap);
            cap::<S>(&mut s, numbers.softcap, numbers.cap_scale, is_capped);
            let mut capped = s;
            let scale = numbers.cap_scale;
            s = add_biases::<S>(s, scale, &args, &turn.of_head, &rows, plan, entry, t.base);
            if j < turn.masked {
                let (words, masks) = (&plan.words[..], schedule.parts.masks);
                let quad = (lane % 4) * 2;
                s = mask::<S>(s, words, masks, turn.entry, j, row, quad, t.base);
            }
            let stats_at = base
                + comptime!(t.stats_offset() as u32)
                + stage * comptime!(t.stats_bytes() as u32)
                + (lane % 4) * 16;
            let mut p = weights_of::<S>(s, &of_rows, stats_at, 0u32, &numbers, weights);
            if weights_count::<S>(&p, &numbers, 1 + group, 128u32, weights) {
                if comptime!(skips) {
                    dp_started = product::<S>(a2_desc, b2_desc + offset, scores);
                }
                let mut out2_started = out2;
                if comptime!(columns && !t.bias_sums) {
                    let kept = drop_out::<S>(p, &kept, t.score);
                    let left = pack_all::<S, P>(kept, t.half);
                    let wide = b2_wide + offset;
                    out2_started = accumulate::<P, O>(out2, left, wide, t.half, t.value_dim);
                }
                if comptime!(!t.score.biased()) {
                    capped = s;
                }
                // The bias is added after the softcap, so its gradient has no derivative of it.
                let slopes = comptime!(t.score.softcap && !t.bias_sums);
                p = slope_weights::<S>(p, capped, numbers.softcap, slopes);
                let pending = comptime!(usize::from(columns && !t.bias_sums));
                let dp = wait::<S>(dp_started, pending, width);
                let turned = kept_again(&kept, t.base);
                let none = Vector::<u32, P>::zeroed();
                let ds = gradients_of_scores::<S, P>(
                    dp, &p, &none, &of_rows, stats_at, &turned, &args, weights,
                );
                if comptime!(t.bias_sums) {
                    #[unroll]
                    for i in 0..S::value() {
                        if comptime!(i % 4 < 2) {
                            sum0 += ds.extract(i);
                        } else {
                            sum1 += ds.extract(i);
                        }
                    }
                } else {
                    let left = pack_all::<S, P>(ds, t.half);
                    let out1_started =
                        accumulate::<P, O>(out1, left, b1_wide + offset, t.half, t.dim);
                    if comptime!(columns) {
                        out2 = wait::<O>(out2_started, 1usize, comptime!(t.value_dim / 2));
                    }
                    out1 = wait::<O>(out1_started, 0usize, comptime!(t.dim / 2));
                }
            }
            if lane == 0 {
                barrier_arrive(base + comptime!(t.empty()) + stage * 8);
            }
            done += 1;
        }
    }

    if comptime!(t.bias_sums) {
        let head = cube.batch * cube.heads.all + cube.outer;
        store_sums(out, sum0, head, places.upper, lengths.len, listing, t);
        store_sums(out, sum1, head, places.lower, lengths.len, listing, t);
    } else {
        let own = mainloop_rows(&schedule, &cube, &places, row, lengths.len);
        let scale = numbers.scale;
        store_rows_or_sums::<O>(out, &out1, 0u32, 0u32, &own, scale, &shares, t.base, t);
        if comptime!(columns) {
            let factor = factor_of(&args, t.score);
            let (second, shape) = (lengths.second, comptime!(t.of_values()));
            store_rows_or_sums::<O>(out, &out2, second, 1u32, &own, factor, &shares, shape, t);
        }
    }
}

/// Writes the sum of a key, which four lanes have parts of, to `out` as `[batch · heads, keys]` in f32.
#[cube]
fn store_sums(
    out: &mut [Vector<u32, Four>],
    sum: f32,
    head: u32,
    place: u32,
    len: u32,
    listing: &Listing,
    #[comptime] t: MainloopTile,
) {
    let sum = sum + shuffle_xor(sum, 1u32);
    let sum = sum + shuffle_xor(sum, 2u32);
    let position = position_at(place, listing, t.residue);
    if position < len && unit() % 4 == 0 {
        let at = u64::cast_from(head) * u64::cast_from(len) + u64::cast_from(position);
        store_number(global_address::<Vector<u32, Four>>(&*out) + at * 4u64, sum);
    }
}
