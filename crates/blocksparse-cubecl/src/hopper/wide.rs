//! dK and dV of heads wider than 128: one cube per tile of 64 keys, whose gradients two warpgroups share.
//!
//! ```text
//!                      first warpgroup                         second warpgroup
//! per step j:          s is done                               dp = v · dOᵀ is done
//!                      p = exp2(s · log2_scale − lse)          waits for p
//!                      p to shared memory                 ──►  ds = p ∘ (dp − delta)
//!                      dV += p · dO      wgmma, started        dK += ds · q      wgmma, started
//!                      s of step j + 1   wgmma, started        dp of step j + 1  wgmma, started
//! ```
//!
//! Both warpgroups issue the same instruction for each product, with different operands. The 256 columns of dK and of dV take 128 registers per unit each,
//! so a warpgroup has registers for only one of them. The first warpgroup passes its weights through shared memory to the same unit of the other, in half
//! precision; with a softcap, already multiplied by its derivative. The second warpgroup lags behind, so it loads.

// Variables in kernels need an initial value.
#![allow(unused_assignments)]

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
use crate::shared::addressing::{Four, MainloopOperands, Schedule};
use crate::shared::score::ScoreScalars;

/// Named barriers for the weights of two steps: filled, and read.
const FULL: u32 = 1;
const EMPTY: u32 = 3;

/// Arguments as in [`one_mainloop`](super::mainloops::one_mainloop) with its loop over columns: keys, values, queries, gradient of the output.
#[cube(launch_unchecked)]
pub fn wide_columns<S: Size, P: Size, O: Size>(
    operands: MainloopOperands<TensorMap<u32, Tiled>>,
    stats_map: &TensorMap<f32, Tiled>,
    out: &mut [Vector<u32, Four>],
    schedule: Schedule,
    args: ComptimeOption<PairArgs>,
    shares: ComptimeOption<TileShares>,
    lengths: MainloopLengths,
    numbers: ScoreScalars,
    #[comptime] t: MainloopTile,
) {
    let weights = comptime!(t.weights());
    let plan = &schedule.plan;
    let heads_per_kv = lengths.heads_per_kv;
    let cube = begin(&operands, stats_map, &shares, &schedule, heads_per_kv, t);
    let (base, lane) = (cube.base, cube.lane);
    let group = cube.warp / 4;
    let row = cube.warp % 4 * 16 + lane / 4;
    let places = own_places(&plan.words[..], cube.rows_at, row, comptime!(t.own_shape()));
    let rows = unit_rows(places.upper, places.lower, &plan.listing, t.base);

    // The first warpgroup uses k and q, then dO. The second uses v and dO, then q.
    let buffers = comptime!((t.stages * t.b_bytes()) as u32);
    let b_address = base + comptime!(t.b1_offset() as u32);
    let own_desc = descriptor(
        base + comptime!(t.a1_offset() as u32) + group * comptime!(t.a_bytes() as u32),
        16usize,
    );
    let deep = descriptor(b_address + group * buffers, 16usize);
    let wide = descriptor(b_address + (1 - group) * buffers, comptime!(t.cols * ROW));
    let weights_at = base + comptime!(t.weights_offset() as u32) + UNIT_POS_X % 128 * 16;

    let width = S::value();
    let of_rows = no_row_stats();
    let mut sums = Vector::<f32, O>::zeroed();
    let mut done = 0u32;
    // Steps of other cubes before the first of this one.
    let mut before = cube.stretch.first;
    barrier_wait(base, 0u32);
    if cube.cursor.loaded.read() > 0 {
        barrier_wait(base + comptime!(t.full()), 0u32);
    }
    let started = product::<S>(own_desc, deep, comptime!(t.scores(t.dim)));
    let mut x = wait::<S>(started, 0usize, width);
    for turn in 0..heads_per_kv {
        let turn = turn_of(&cube, &schedule, &args, turn, before, done, t);
        before -= turn.steps.first;
        for j in turn.steps.first..turn.steps.end {
            let stage = done % comptime!(t.stages as u32);
            let offset = u64::cast_from(stage * comptime!((t.b_bytes() >> 4) as u32));
            cube.load(&schedule, t);
            let entry = turn.entry + (j * comptime!(t.entries() as u32 * 2)) as usize;
            let kept = kept_pairs(&args, &turn.of_head, &rows, plan, entry, t.base);
            let stats_at = base
                + comptime!(t.stats_offset() as u32)
                + stage * comptime!(t.stats_bytes() as u32)
                + (lane % 4) * 16;
            let even = done & 1;
            let exchange = weights_at + even * comptime!(t.weights_bytes() as u32);
            let mut left = Vector::<u32, P>::zeroed();
            if group == 0 {
                let mut s = x;
                let is_capped = comptime!(t.score.softcap);
                cap::<S>(&mut s, numbers.softcap, numbers.cap_scale, is_capped);
                let capped = s;
                let scale = numbers.cap_scale;
                s = add_biases::<S>(s, scale, &args, &turn.of_head, &rows, plan, entry, t.base);
                if j < turn.masked {
                    let (words, masks) = (&plan.words[..], schedule.parts.masks);
                    let quad = (lane % 4) * 2;
                    s = mask::<S>(s, words, masks, turn.entry, j, row, quad, t.base);
                }
                let p = weights_of::<S>(s, &of_rows, stats_at, 0u32, &numbers, weights);
                left = pack_all::<S, P>(p, t.half);
                let mut weights = left;
                if comptime!(t.score.softcap) {
                    let sloped = slope_weights::<S>(p, capped, numbers.softcap, is_capped);
                    weights = pack_all::<S, P>(sloped, t.half);
                }
                if done >= 2 {
                    named_sync(comptime!(EMPTY) + even, 256u32);
                }
                store_own::<P>(weights, exchange);
                named_arrive(comptime!(FULL) + even, 256u32);
                if comptime!(t.score.dropout) {
                    left = pack_all::<S, P>(drop_out::<S>(p, &kept, t.score), t.half);
                }
            } else {
                named_sync(comptime!(FULL) + even, 256u32);
                let given = load_own::<P>(exchange);
                let turned = kept_again(&kept, t.base);
                let none = Vector::<f32, S>::zeroed();
                let ds = gradients_of_scores::<S, P>(
                    x, &none, &given, &of_rows, stats_at, &turned, &args, weights,
                );
                left = pack_all::<S, P>(ds, t.half);
                named_arrive(comptime!(EMPTY) + even, 256u32);
            }
            let sums_started = accumulate::<P, O>(sums, left, wide + offset, t.half, t.dim);
            let next = (done + 1) % comptime!(t.stages as u32);
            if cube.cursor.loaded.read() > done + 1 {
                let parity = ((done + 1) / comptime!(t.stages as u32)) & 1;
                barrier_wait(base + comptime!(t.full()) + next * 8, parity);
            }
            // After the last step the operands are arbitrary, and the result is unused.
            let started = product::<S>(
                own_desc,
                deep + u64::cast_from(next * comptime!((t.b_bytes() >> 4) as u32)),
                comptime!(t.scores(t.dim)),
            );
            sums = wait::<O>(sums_started, 1usize, comptime!(t.dim / 2));
            if lane == 0 {
                barrier_arrive(base + comptime!(t.empty()) + stage * 8);
            }
            x = wait::<S>(started, 0usize, width);
            done += 1;
        }
    }

    let own = mainloop_rows(&schedule, &cube, &places, row, lengths.len);
    let mut factor = numbers.scale;
    let mut start = 0u32;
    if group == 0 {
        factor = factor_of(&args, t.score);
        start = lengths.second;
    }
    let which = 1 - group;
    // If values are narrower than keys, the first warpgroup stores rows of their width.
    let mut is_narrow = false.runtime();
    if comptime!(t.value_dim != t.dim) {
        is_narrow = group == 0;
    }
    if is_narrow {
        let shape = comptime!(t.of_values());
        store_rows_or_sums::<O>(out, &sums, start, which, &own, factor, &shares, shape, t);
    } else {
        store_rows_or_sums::<O>(out, &sums, start, which, &own, factor, &shares, t.base, t);
    }
}
