//! The backward pass in two launches: one kernel for dQ (a loop over rows) and for dK and dV (a loop over columns), one cube per tile,
//! one warpgroup per 64 rows of it.
//!
//! ```text
//!            a1  a2   b1  b2        s  = a1 · b1ᵀ      p  = exp2(s · log2_scale − lse)
//! rows       q   dO   k   v         dp = a2 · b2ᵀ      ds = p ∘ (dp − delta)
//! columns    k   v    q   dO        out1 += ds · b1    out2 += p · b2   (columns only)
//!
//! all warps  TMA:  b1, b2, stats of step j + stages − lag     gathered boxes of `group` rows
//! every warpgroup, per step j:
//!     s, dp            wgmma, both started
//!     s done:          p, to registers as a left operand, while dp is computed
//!     out2 += p · b2   wgmma, started
//!     dp done:         ds, likewise
//!     out1 += ds · b1  wgmma
//! ```
//!
//! p and ds are left operands in registers: they never go through shared memory. In a loop over columns s, p, dp and ds
//! are transposes, and lse and delta belong to columns; TMA brings them along. `out1 · scale` is dQ or dK, out2 is dV.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

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
use crate::shared::addressing::{Four, Listing, Schedule, batch_of, head_of};
use crate::shared::score::ScoreScalars;
use blocksparse::plan::Mainloop;

/// `a1`, `a2`, `b1`, `b2` as maps `[batch, heads, seq, dim]`, with `residue` `[batch, heads, stride, seq / stride, dim]`;
/// `stats` `[batch · heads, pitch, 2]`: `lse · log2 e` and delta of the query at each place, as a map and as numbers; `out`
/// `[batch, heads, len, dim]` in eights of elements, out2 from the `second`-th on, or with `bias_sums` `[batch, query heads, len]` in f32. With `carry` the results are added to it. Where cubes share tiles
/// `shares` has the sums of these: see [`long_tiles`](super::long_tiles). Where biases are
/// added to scores that are not softcapped, `cap_scale` is the scale.
#[cube(launch_unchecked)]
pub fn one_mainloop<S: Size, P: Size, O: Size>(
    a1: &TensorMap<u32, Tiled>,
    a2: &TensorMap<u32, Tiled>,
    b1: &TensorMap<u32, Tiled>,
    b2: &TensorMap<u32, Tiled>,
    stats_map: &TensorMap<f32, Tiled>,
    stats: &[f32],
    out: &mut [Vector<u32, Four>],
    plan: &[u32],
    args: ComptimeOption<PairArgs>,
    shares: ComptimeOption<TileShares>,
    schedule: Schedule,
    lengths: MainloopLengths,
    numbers: ScoreScalars,
    #[comptime] mainloop: Mainloop,
    #[comptime] t: MainloopTile,
) {
    let columns = comptime!(matches!(mainloop, Mainloop::Columns));
    let parts = schedule.parts;
    let listing = schedule.listing;
    let slice = schedule.slice;
    let heads_per_kv = lengths.heads_per_kv;
    let pitch = lengths.pitch;
    let len = lengths.len;
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

    // In a loop over columns a tile of keys goes through all query heads of its group.
    let mut first_head = outer;
    let mut turns = 1u32;
    let mut heads = slice.heads as u32;
    let mut divisor = heads_per_kv;
    let mut own_head = outer;
    if comptime!(t.bias_sums) {
        // A tile is of one query head.
        divisor = 1u32;
        own_head = outer / heads_per_kv;
    } else if comptime!(columns) {
        first_head = outer * heads_per_kv;
        turns = heads_per_kv;
        heads *= heads_per_kv;
        divisor = 1u32;
    }
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
        head: own_head,
        batch,
    };
    load_own_rows(plan, &own, base, t);

    let loads = Loads {
        b1: tensor_map_address(b1),
        b2: tensor_map_address(b2),
        stats: tensor_map_address(stats_map),
        base,
        class_len,
        batch,
        heads,
        divisor,
        index: warp + lane * comptime!(t.warps()),
    };
    let stretch = stretch_of_cube(plan, &parts, heads_at, first_head, turns, tile, &share, t);
    // The next step to load.
    let cursor = Cursor {
        head: RuntimeCell::<u32>::new(first_head),
        end: first_head + turns,
        entry: RuntimeCell::<usize>::new(0usize),
        j: RuntimeCell::<u32>::new(stretch.first),
        steps: RuntimeCell::<u32>::new(0u32),
        loaded: RuntimeCell::<u32>::new(0u32),
        stretch: stretch.steps,
    };
    open(plan, &parts, ranked + 1, &cursor);
    #[unroll]
    for _ in 0..comptime!(t.stages - t.lag) {
        load_next(plan, &parts, &loads, heads_at, tile, &cursor, columns, t);
    }

    let group = warp / 4;
    let row = warp * 16 + lane / 4;
    let group_rows = group * comptime!((64 * ROW) as u32);
    let a1_desc = descriptor(base + comptime!(t.a1_offset() as u32) + group_rows, 16usize);
    let a2_desc = descriptor(base + comptime!(t.a2_offset() as u32) + group_rows, 16usize);
    let b1_address = base + comptime!(t.b1_offset() as u32);
    let b2_address = base + comptime!(t.b2_offset() as u32);
    // Depth-major for s and dp, dim-major for the outputs: the same bytes.
    let b1_desc = descriptor(b1_address, 16usize);
    let b2_desc = descriptor(b2_address, 16usize);
    let b1_wide = descriptor(b1_address, comptime!(t.cols * ROW));
    let b2_wide = descriptor(b2_address, comptime!(t.cols * ROW));

    let mut lse0 = f32::new(0.0);
    let mut lse1 = f32::new(0.0);
    let mut delta0 = f32::new(0.0);
    let mut delta1 = f32::new(0.0);
    // Of the unit's rows `row` and `row + 8`.
    let places = own_places(plan, rows_at, row, comptime!(t.own_shape()));
    if comptime!(!columns) {
        let first = (batch * heads + outer) * pitch;
        if places.upper < pitch {
            let at = (first + places.upper) as usize * 2;
            lse0 = stats[at];
            delta0 = stats[at + 1];
        }
        if places.lower < pitch {
            let at = (first + places.lower) as usize * 2;
            lse1 = stats[at];
            delta1 = stats[at + 1];
        }
    }

    let rows = unit_rows(
        places.upper,
        places.lower,
        &listing,
        comptime!(t.pairs(mainloop)),
    );
    let mut out1 = Vector::<f32, O>::zeroed();
    let mut out2 = Vector::<f32, O>::zeroed();
    // Of the gradients of scores, over the queries of the unit's rows.
    let mut sum0 = f32::new(0.0);
    let mut sum1 = f32::new(0.0);
    let mut done = 0u32;
    // Steps of other cubes before the first of this one.
    let mut before = stretch.first;
    barrier_wait(base, 0u32);
    for turn in 0..turns {
        let record = parts.tiles
            + (plan[heads_at + (first_head + turn) as usize] as usize + tile as usize) * 3;
        let entry = parts.entries + plan[record] as usize * 2;
        let steps = uniform(plan[record + 1]);
        let masked = uniform(plan[record + 2]);
        let of_head = options_of(
            &args,
            batch,
            first_head + turn,
            comptime!(t.pairs(mainloop)),
        );
        let own = steps_of_turn(before, done, steps, &stretch, t);
        before -= own.first;
        for j in own.first..own.end {
            let stage = done % comptime!(t.stages as u32);
            let parity = (done / comptime!(t.stages as u32)) & 1;
            let offset = u64::cast_from(stage * comptime!((t.b_bytes() >> 4) as u32));
            barrier_wait(base + comptime!(t.full()) + stage * 8, parity);
            let s_started = product::<S>(a1_desc, b1_desc + offset, comptime!(t.scores(t.dim)));
            let dp_started =
                product::<S>(a2_desc, b2_desc + offset, comptime!(t.scores(t.value_dim)));
            load_next(plan, &parts, &loads, heads_at, tile, &cursor, columns, t);
            let its_entry = entry + (j * comptime!(t.entries() as u32 * 2)) as usize;
            let kept = kept_pairs(
                &args,
                &of_head,
                &rows,
                plan,
                its_entry,
                &listing,
                comptime!(t.pairs(mainloop)),
            );
            let width = S::value();
            let mut s = wait::<S>(s_started, 1usize, width);
            cap::<S>(&mut s, softcap, cap_scale, t.options.score.softcap);
            let mut capped = s;
            s = add_biases::<S>(
                s,
                cap_scale,
                &args,
                &of_head,
                &rows,
                plan,
                its_entry,
                &listing,
                comptime!(t.pairs(mainloop)),
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
            let stats_at = base
                + comptime!(t.stats_offset() as u32)
                + stage * comptime!(t.stats_bytes() as u32)
                + (lane % 4) * 16;
            let mut p = Vector::<f32, S>::zeroed();
            #[unroll]
            for eight in 0..comptime!(t.cols / 8) {
                let mut four = Vector::<f32, Four>::zeroed();
                if comptime!(columns) {
                    four = shared_load_four(stats_at + comptime!(eight as u32 * 64));
                }
                #[unroll]
                for i in 0..4usize {
                    let at = comptime!(4 * eight + i);
                    let mut lse = if comptime!(i < 2) { lse0 } else { lse1 };
                    if comptime!(columns) {
                        lse = four.extract(comptime!(i % 2 * 2));
                    }
                    p.insert(at, exp2(multiply_add(s.extract(at), log2_scale, -lse)));
                }
            }
            let mut out2_started = out2;
            if comptime!(columns && !t.bias_sums) {
                let kept = drop_out::<S>(p, &kept, comptime!(t.options));
                let left = pack_all::<S, P>(kept, t.half);
                let wide = b2_wide + offset;
                out2_started = accumulate::<P, O>(out2, left, wide, t.half, t.value_dim);
            }
            if comptime!(!t.options.biased()) {
                capped = s;
            }
            // The bias is added to what was softcapped.
            let slopes = comptime!(t.options.score.softcap && !t.bias_sums);
            p = slope_weights::<S>(p, capped, softcap, slopes);
            let mut dp = wait::<S>(
                dp_started,
                comptime!(usize::from(columns && !t.bias_sums)),
                width,
            );
            let turned = kept_again(&kept, comptime!(t.pairs(mainloop)));
            #[unroll]
            for eight in 0..comptime!(t.cols / 8) {
                let mut four = Vector::<f32, Four>::zeroed();
                if comptime!(columns) {
                    four = shared_load_four(stats_at + comptime!(eight as u32 * 64));
                }
                #[unroll]
                for i in 0..4usize {
                    let at = comptime!(4 * eight + i);
                    let mut delta = if comptime!(i < 2) { delta0 } else { delta1 };
                    if comptime!(columns) {
                        delta = four.extract(comptime!(i % 2 * 2 + 1));
                    }
                    let inner = drop_gradient(dp.extract(at), delta, &turned, &args, at, t.options);
                    dp.insert(at, p.extract(at) * inner);
                }
            }
            if comptime!(t.bias_sums) {
                #[unroll]
                for i in 0..S::value() {
                    if comptime!(i % 4 < 2) {
                        sum0 += dp.extract(i);
                    } else {
                        sum1 += dp.extract(i);
                    }
                }
            } else {
                let left = pack_all::<S, P>(dp, t.half);
                let out1_started = accumulate::<P, O>(out1, left, b1_wide + offset, t.half, t.dim);
                if comptime!(columns) {
                    out2 = wait::<O>(out2_started, 1usize, comptime!(t.value_dim / 2));
                }
                out1 = wait::<O>(out1_started, 0usize, comptime!(t.dim / 2));
            }
            if lane == 0 {
                barrier_arrive(base + comptime!(t.empty()) + stage * 8);
            }
            done += 1;
        }
    }

    if comptime!(t.bias_sums) {
        store_sums(
            out,
            sum0,
            batch * heads + outer,
            places.upper,
            len,
            &listing,
            t,
        );
        store_sums(
            out,
            sum1,
            batch * heads + outer,
            places.lower,
            len,
            &listing,
            t,
        );
    } else {
        let own = MainloopRows {
            outer: batch * slice.heads as u32 + outer,
            row,
            rows: StoredRows {
                place: places.upper,
                place8: places.lower,
                listing,
                len,
                lane,
            },
        };
        store_rows_or_sums::<O>(
            out,
            &out1,
            0u32,
            0u32,
            &own,
            numbers.scale,
            &shares,
            mainloop,
            comptime!(t.store()),
            t,
        );
        if comptime!(columns) {
            let factor = factor_of(&args, comptime!(t.options));
            store_rows_or_sums::<O>(
                out,
                &out2,
                lengths.second,
                1u32,
                &own,
                factor,
                &shares,
                mainloop,
                comptime!(t.store_values()),
                t,
            );
        }
    }
}

/// Writes the sum of a key, of which four lanes have a part each, to `out` as `[batch · heads, keys]` in f32.
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
    let position = position_at(place, listing, comptime!(t.residue));
    if position < len && unit() % 4 == 0 {
        let at = u64::cast_from(head) * u64::cast_from(len) + u64::cast_from(position);
        store_number(global_address::<Vector<u32, Four>>(&*out) + at * 4u64, sum);
    }
}
