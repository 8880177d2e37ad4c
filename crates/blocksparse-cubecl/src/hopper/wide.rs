//! dK and dV of heads that are wider than 128: one cube per tile of 64 keys, whose sums two warpgroups share.
//!
//! ```text
//!                      first warpgroup                         second warpgroup
//! per step j:          s is there                              dp = v · dOᵀ is there
//!                      p = exp2(s · log2_scale − lse)          waits for p
//!                      p, to shared memory                ──►  ds = p ∘ (dp − delta)
//!                      dV += p · dO      wgmma, started        dK += ds · q      wgmma, started
//!                      s of step j + 1   wgmma, started        dp of step j + 1  wgmma, started
//! ```
//!
//! Each product is one instruction of both, with other operands: 256 columns of dK and of dV have 128 registers a unit each, and a warpgroup has
//! room for one of them. Weights go to the same unit of the other warpgroup as the registers they are, in half precision. With a softcap they
//! have its slope by then. The second warpgroup, which is behind, loads.

// Kernels have no variables without a first value.
#![allow(unused_assignments)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::dropout::*;
use super::gradient::*;
use super::long_tiles::*;
use super::mainloop_loads::*;
use super::options::*;
use super::rows::{own_places, own_rows, pack_all};
use super::tiles::MainloopTile;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, Schedule, batch_of, head_of};
use crate::shared::score::ScoreScalars;
use blocksparse::plan::Mainloop;

/// Numbers of the named barriers: weights of two steps are there, and have been read.
const FULL: u32 = 1;
const EMPTY: u32 = 3;

/// Arguments as those of [`one_mainloop`](super::mainloops::one_mainloop), in its loop over columns: keys, values, queries, the gradient of the output.
#[cube(launch_unchecked)]
pub fn wide_columns<S: Size, P: Size, O: Size>(
    a1: &TensorMap<u32, Tiled>,
    a2: &TensorMap<u32, Tiled>,
    b1: &TensorMap<u32, Tiled>,
    b2: &TensorMap<u32, Tiled>,
    stats_map: &TensorMap<f32, Tiled>,
    out: &mut [Vector<u32, Four>],
    plan: &[u32],
    args: ComptimeOption<PairArgs>,
    shares: ComptimeOption<TileShares>,
    schedule: Schedule,
    lengths: MainloopLengths,
    numbers: ScoreScalars,
    #[comptime] t: MainloopTile,
) {
    let parts = schedule.parts;
    let listing = schedule.listing;
    let slice = schedule.slice;
    let heads_per_kv = lengths.heads_per_kv;
    let log2_scale = numbers.log2_scale;
    let softcap = numbers.softcap;
    let cap_scale = numbers.cap_scale;
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let outer = head_of(&slice) as u32;
    let batch = batch_of(&slice) as u32;

    if UNIT_POS_X == 0 {
        barrier_init(base, 1u32);
        ring_init(
            base + comptime!(t.full()),
            base + comptime!(t.empty()),
            t.stages,
            comptime!(t.warps()),
        );
    }
    sync_cube();

    let first_head = outer * heads_per_kv;
    let heads_at = parts.heads + batch as usize * parts.batch;
    let record0 = plan[heads_at + first_head as usize] as usize;
    let share = share_of_cube(&shares, t);
    let ranked = parts.order + (record0 + share.rank as usize) * 4;
    let tile = plan[ranked];
    let rows_at = own_rows(&parts, record0, tile, comptime!(t.own_shape()));
    let class_len = listing.class_len as u32;
    let own = OwnRows {
        a1: tensor_map_address(a1),
        a2: tensor_map_address(a2),
        at: rows_at,
        class_len,
        head: outer,
        batch,
    };
    load_own_rows(plan, &own, base, t);

    let group = warp / 4;
    let mut index = comptime!(u32::MAX).runtime();
    if group == 1 {
        index = warp % 4 + lane * 4;
    }
    let loads = Loads {
        b1: tensor_map_address(b1),
        b2: tensor_map_address(b2),
        stats: tensor_map_address(stats_map),
        base,
        class_len,
        batch,
        heads: slice.heads as u32 * heads_per_kv,
        divisor: 1u32,
        index,
    };
    let stretch = stretch_of_cube(
        plan,
        &parts,
        heads_at,
        first_head,
        heads_per_kv,
        tile,
        &share,
        t,
    );
    // The next step to load.
    let cursor = Cursor {
        head: RuntimeCell::<u32>::new(first_head),
        end: first_head + heads_per_kv,
        entry: RuntimeCell::<usize>::new(0usize),
        j: RuntimeCell::<u32>::new(stretch.first),
        steps: RuntimeCell::<u32>::new(0u32),
        loaded: RuntimeCell::<u32>::new(0u32),
        stretch: stretch.steps,
    };
    open(plan, &parts, ranked + 1, &cursor);
    #[unroll]
    for _ in 0..comptime!(t.stages - t.lag) {
        load_next(plan, &parts, &loads, heads_at, tile, &cursor, true, t);
    }

    let row = warp % 4 * 16 + lane / 4;
    let places = own_places(plan, rows_at, row, comptime!(t.own_shape()));
    let rows = unit_rows(
        places.upper,
        places.lower,
        &listing,
        comptime!(t.pairs(Mainloop::Columns)),
    );

    // Of the first warpgroup k and q, then dO; of the second v and dO, then q.
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
    let mut sums = Vector::<f32, O>::zeroed();
    let mut done = 0u32;
    // Steps of other cubes before the first of this one.
    let mut before = stretch.first;
    barrier_wait(base, 0u32);
    if cursor.loaded.read() > 0 {
        barrier_wait(base + comptime!(t.full()), 0u32);
    }
    let started = product::<S>(own_desc, deep, comptime!(t.scores(t.dim)));
    let mut x = wait::<S>(started, 0usize, width);
    for turn in 0..heads_per_kv {
        let head = first_head + turn;
        let record = parts.tiles + (plan[heads_at + head as usize] as usize + tile as usize) * 3;
        let entry = parts.entries + plan[record] as usize * 2;
        let steps = uniform(plan[record + 1]);
        let masked = uniform(plan[record + 2]);
        let of_head = options_of(&args, batch, head, comptime!(t.pairs(Mainloop::Columns)));
        let own = steps_of_turn(before, done, steps, &stretch, t);
        before -= own.first;
        for j in own.first..own.end {
            let stage = done % comptime!(t.stages as u32);
            let offset = u64::cast_from(stage * comptime!((t.b_bytes() >> 4) as u32));
            load_next(plan, &parts, &loads, heads_at, tile, &cursor, true, t);
            let its_entry = entry + (j * comptime!(t.entries() as u32 * 2)) as usize;
            let kept = kept_pairs(
                &args,
                &of_head,
                &rows,
                plan,
                its_entry,
                &listing,
                comptime!(t.pairs(Mainloop::Columns)),
            );
            let stats_at = base
                + comptime!(t.stats_offset() as u32)
                + stage * comptime!(t.stats_bytes() as u32)
                + (lane % 4) * 16;
            let even = done & 1;
            let exchange = weights_at + even * comptime!(t.weights_bytes() as u32);
            let mut left = Vector::<u32, P>::zeroed();
            if group == 0 {
                let mut s = x;
                cap::<S>(&mut s, softcap, cap_scale, t.options.score.softcap);
                let capped = s;
                s = add_biases::<S>(
                    s,
                    cap_scale,
                    &args,
                    &of_head,
                    &rows,
                    plan,
                    its_entry,
                    &listing,
                    comptime!(t.pairs(Mainloop::Columns)),
                );
                if j < masked {
                    s = mask::<S>(
                        s,
                        plan,
                        parts.masks,
                        entry,
                        j,
                        row,
                        (lane % 4) * 2,
                        comptime!(t.mask()),
                    );
                }
                let mut p = Vector::<f32, S>::zeroed();
                #[unroll]
                for eight in 0..comptime!(t.cols / 8) {
                    let four = shared_load_four(stats_at + comptime!(eight as u32 * 64));
                    #[unroll]
                    for i in 0..4usize {
                        let at = comptime!(4 * eight + i);
                        let lse = four.extract(comptime!(i % 2 * 2));
                        p.insert(at, exp2(multiply_add(s.extract(at), log2_scale, -lse)));
                    }
                }
                left = pack_all::<S, P>(p, t.half);
                let mut weights = left;
                if comptime!(t.options.score.softcap) {
                    let sloped = slope_weights::<S>(p, capped, softcap, t.options.score.softcap);
                    weights = pack_all::<S, P>(sloped, t.half);
                }
                if done >= 2 {
                    named_sync(comptime!(EMPTY) + even, 256u32);
                }
                store_own::<P>(weights, exchange);
                named_arrive(comptime!(FULL) + even, 256u32);
                if comptime!(t.options.score.dropout) {
                    left = pack_all::<S, P>(drop_out::<S>(p, &kept, comptime!(t.options)), t.half);
                }
            } else {
                named_sync(comptime!(FULL) + even, 256u32);
                let weights = load_own::<P>(exchange);
                let turned = kept_again(&kept, comptime!(t.pairs(Mainloop::Columns)));
                let mut ds = x;
                #[unroll]
                for eight in 0..comptime!(t.cols / 8) {
                    let four = shared_load_four(stats_at + comptime!(eight as u32 * 64));
                    #[unroll]
                    for i in 0..4usize {
                        let at = comptime!(4 * eight + i);
                        let delta = four.extract(comptime!(i % 2 * 2 + 1));
                        let weight = unpack(
                            weights.extract(comptime!(at / 2)),
                            comptime!(at % 2 == 1),
                            t.half,
                        );
                        let inner =
                            drop_gradient(ds.extract(at), delta, &turned, &args, at, t.options);
                        ds.insert(at, weight * inner);
                    }
                }
                left = pack_all::<S, P>(ds, t.half);
                named_arrive(comptime!(EMPTY) + even, 256u32);
            }
            let sums_started = accumulate::<P, O>(sums, left, wide + offset, t.half, t.dim);
            let next = (done + 1) % comptime!(t.stages as u32);
            if cursor.loaded.read() > done + 1 {
                let parity = ((done + 1) / comptime!(t.stages as u32)) & 1;
                barrier_wait(base + comptime!(t.full()) + next * 8, parity);
            }
            // After the last step of whatever is there, for nobody.
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

    let own = MainloopRows {
        outer: batch * slice.heads as u32 + outer,
        row,
        rows: StoredRows {
            place: places.upper,
            place8: places.lower,
            listing,
            len: lengths.len,
            lane,
        },
    };
    let mut factor = numbers.scale;
    let mut start = 0u32;
    if group == 0 {
        factor = factor_of(&args, comptime!(t.options));
        start = lengths.second;
    }
    let which = 1 - group;
    let mainloop = Mainloop::Columns;
    // Where values are narrower than keys the first warpgroup stores rows of another width.
    let mut is_narrow = false.runtime();
    if comptime!(t.value_dim != t.dim) {
        is_narrow = group == 0;
    }
    if is_narrow {
        let shape = comptime!(t.store_values());
        store_rows_or_sums::<O>(
            out, &sums, start, which, &own, factor, &shares, mainloop, shape, t,
        );
    } else {
        let shape = comptime!(t.store());
        store_rows_or_sums::<O>(
            out, &sums, start, which, &own, factor, &shares, mainloop, shape, t,
        );
    }
}
