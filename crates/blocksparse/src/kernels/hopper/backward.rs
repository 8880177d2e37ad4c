//! The backward kernel: dQ, dK and dV in one walk over columns. A cube has a tile of keys, a warpgroup 64 of them, and walks the
//! queries that see the tile.
//!
//! ```text
//!            s  = k · qᵀ     p  = exp2(s · log2_scale − lse)     64 keys × `cols` queries per warpgroup, so transposed
//!            dp = v · dOᵀ    ds = p ∘ (dp − delta)
//!
//! all warps  TMA:  q, dO, stats of step j + stages − lag         gathered boxes of `group` rows
//! every warpgroup, per step j:
//!     dp                wgmma, started; s has been since step j − 1
//!     s done:           p, to registers as a left operand, while dp is computed
//!     dV += p · dO      wgmma, started
//!     dp done:          ds, likewise, and to shared memory as [keys][queries]
//!     all warpgroups have stored ds
//!     dQ  = dsᵀ · k     wgmma, started, over all keys of the tile: for half the columns (or half the queries) each
//!     dK += ds · q      wgmma, started
//!     s of step j + 1   wgmma, started
//!     dQ done:          wait for the tiles before this one; add to the scratch
//!     dK, s done        nothing is on its way where the loop ends, or ptxas would serialise all products
//! ```
//!
//! The scratch is f32 and belongs to all tiles of a head. Tiles add to 16 queries in launch order: the plan says
//! how many visits come before, and a counter says how many there were. A tile waits only for tiles launched
//! before it, so the first of those that run never waits. Each warp has its own 16 queries, and so a chain of its own. The first
//! visitor stores, so nothing but the counters needs zeros. [`finish`] makes dQ of the sums.
//!
//! With `persistent` a cube computes tile after tile: it draws the next ones from a counter, has the keys and values of two, and computes the
//! first s of the next with the last dQ of this one.
//!
//! The scratch has the layout of wgmma's results: for each 16 queries, for each part of the columns, for each 8 of the queries, for each 16
//! columns, the four numbers of each lane.

// What is known at compile time stays apart from what is not; kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use super::BackwardTile;
use super::asm::*;
use super::forward::{own_place, own_rows, pack_all};
use super::gradient::*;
use super::options::*;
use crate::kernels::simt::forward::LOW;
use crate::kernels::simt::tile::{Four, Listing, PlanParts, Strides, position_of};
use crate::plan::{MASKED_STEP, NO_VISIT};

/// Lengths of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Lengths {
    /// Tiles of a head.
    pub tiles: u32,
    /// Heads of keys, of all batch entries, that take turns in the order of cubes.
    pub spread: u32,
    /// Heads of keys.
    pub kv_heads: u32,
    /// Query heads to a head of keys.
    pub heads_per_kv: u32,
    /// Batch entries.
    pub batch: u32,
    /// Keys.
    pub seq_kv: u32,
    /// Places of a query head in the stats and the scratch.
    pub pitch: u32,
    /// Eights of elements before dV.
    pub second: u32,
    /// Counters there are; the one after them is that of tickets.
    pub counters: u32,
}

/// A tile of keys.
#[derive(CubeType, Clone, Copy)]
struct Own {
    /// Its index, by falling work.
    rank: u32,
    kv_head: u32,
    batch: u32,
    /// Where its rows are: see [`own_rows`].
    rows: u32,
    /// Of its first query head: the word of its first entry, and its steps.
    entry: u32,
    steps: u32,
}

/// Tile `index` of the launch. Heads take turns: tiles of one head wait for each other, so few of them should run side by side;
/// but those that do share what they read in the cache.
#[cube]
fn tile_of_launch(
    plan: &[u32],
    parts: &PlanParts,
    lengths: &Lengths,
    index: u32,
    #[comptime] t: BackwardTile,
) -> Own {
    let chunk = index / (lengths.tiles * lengths.spread);
    let within = index % (lengths.tiles * lengths.spread);
    let first = chunk * lengths.spread;
    let turns = lengths.spread.min(lengths.kv_heads * lengths.batch - first);
    let outer = first + within % turns;
    let rank = within / turns;
    let kv_head = outer % lengths.kv_heads;
    let batch = outer / lengths.kv_heads;
    let head = (kv_head * lengths.heads_per_kv) as usize;
    let record0 = plan[parts.heads + batch as usize * parts.batch + head] as usize;
    let ranked = parts.order + (record0 + rank as usize) * 4;
    Own {
        rank,
        kv_head,
        batch,
        rows: own_rows(
            parts,
            record0,
            plan[ranked],
            comptime!(t.rows()),
            comptime!(t.group),
            comptime!(t.clustered),
        ),
        entry: parts.entries as u32 + plan[ranked + 1] * 3,
        steps: plan[ranked + 2],
    }
}

/// Rank of a tile that there is not.
const NONE: u32 = u32::MAX;

/// Writes down tile `index` as the cube's `turn`-th: what is asked of a tile again and again takes a while to find.
#[cube]
fn note(
    plan: &[u32],
    parts: &PlanParts,
    lengths: &Lengths,
    base: u32,
    index: u32,
    turn: u32,
    #[comptime] t: BackwardTile,
) {
    let slot = base + comptime!(t.slots()) + (turn & 1) * 32;
    if index < lengths.tiles * lengths.kv_heads * lengths.batch {
        let own = tile_of_launch(plan, parts, lengths, index, t);
        shared_store(slot, own.rank);
        shared_store(slot + 4, own.kv_head);
        shared_store(slot + 8, own.batch);
        shared_store(slot + 12, own.rows);
        shared_store(slot + 16, own.entry);
        shared_store(slot + 20, own.steps);
    } else {
        shared_store(slot, NONE);
    }
}

/// The cube's `turn`-th tile, as noted.
#[cube]
fn noted(base: u32, turn: u32, #[comptime] t: BackwardTile) -> Own {
    let slot = base + comptime!(t.slots()) + (turn & 1) * 32;
    Own {
        rank: shared_load(slot),
        kv_head: shared_load(slot + 4),
        batch: shared_load(slot + 8),
        rows: shared_load(slot + 12),
        entry: shared_load(slot + 16),
        steps: shared_load(slot + 20),
    }
}

/// `k`, `v`, `q`, `grad_out` as maps `[batch, heads, seq, dim]`, with `residue` `[batch, heads, stride, seq / stride, dim]`;
/// `stats` a map `[batch · heads, pitch, 2]` of `lse · log2 e` and delta of the query at each place; `scratch` as above,
/// `counters` one for each 16 queries (8 where a group has no more) and each half of the columns; `out`
/// `[batch, kv_heads, seq_kv, dim]` in eights of elements, dV from the `second`-th on. With `carry` dK and dV are added to it. Where biases are
/// added to scores that are not softcapped, `cap_scale` is the scale.
#[cube(launch_unchecked)]
pub fn backward<S: Size, P: Size, O: Size, C: Size>(
    k: &TensorMap<u32, Tiled>,
    v: &TensorMap<u32, Tiled>,
    q: &TensorMap<u32, Tiled>,
    grad_out: &TensorMap<u32, Tiled>,
    stats: &TensorMap<f32, Tiled>,
    scratch: &mut [f32],
    counters: &mut [u32],
    out: &mut [Vector<u32, Four>],
    plan: &[u32],
    args: ComptimeOption<PairArgs>,
    parts: PlanParts,
    listing: Listing,
    lengths: Lengths,
    scale: f32,
    log2_scale: f32,
    softcap: f32,
    cap_scale: f32,
    #[comptime] t: BackwardTile,
) {
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = generic_to_shared::<u32>(unsafe { smem.as_ptr_unchecked() });
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let counters = global_address::<u32>(unsafe { counters.as_ptr_unchecked() });
    let tickets = counters + u64::cast_from(lengths.counters) * 4;

    if UNIT_POS_X == 0 {
        #[unroll]
        for i in 0..comptime!(t.own_buffers()) {
            barrier_init(base + comptime!(t.own() + 8 * i as u32), 1u32);
        }
        #[unroll]
        for i in 0..comptime!(t.stages) {
            let offset = comptime!(8 * i as u32);
            barrier_init(base + comptime!(t.full()) + offset, 1u32);
            barrier_init(base + comptime!(t.empty()) + offset, comptime!(t.warps()));
        }
        barrier_fence();
        if comptime!(t.persistent) {
            note(plan, &parts, &lengths, base, CUBE_POS_X, 0u32, t);
            let second = CUBE_COUNT_X + draw(tickets);
            note(plan, &parts, &lengths, base, second, 1u32, t);
        }
    }
    sync_cube();

    let loads = Loads {
        k: tensor_map_address(k),
        v: tensor_map_address(v),
        q: tensor_map_address(q),
        grad_out: tensor_map_address(grad_out),
        stats: tensor_map_address(stats),
        base,
        class_len: listing.class_len as u32,
        heads: lengths.kv_heads * lengths.heads_per_kv,
    };
    // The next step to load.
    let cursor = Cursor {
        rank: RuntimeCell::<u32>::new(0u32),
        batch: RuntimeCell::<u32>::new(0u32),
        head: RuntimeCell::<u32>::new(0u32),
        end: RuntimeCell::<u32>::new(0u32),
        entry: RuntimeCell::<usize>::new(0usize),
        j: RuntimeCell::<u32>::new(0u32),
        steps: RuntimeCell::<u32>::new(0u32),
        loaded: RuntimeCell::<u32>::new(0u32),
        ahead: RuntimeCell::<u32>::new(0u32),
    };
    if comptime!(t.persistent) {
        let own = noted(base, 0u32, t);
        load_tile(plan, &loads, &own, 0u32, t);
        turn_to(&own, &lengths, &cursor);
        let next = noted(base, 1u32, t);
        if next.rank != NONE {
            load_tile(plan, &loads, &next, 1u32, t);
        }
    } else {
        let own = tile_of_launch(plan, &parts, &lengths, CUBE_POS_X, t);
        load_tile(plan, &loads, &own, 0u32, t);
        turn_to(&own, &lengths, &cursor);
    }
    #[unroll]
    for _ in 0..comptime!(t.stages - t.lag) {
        load_next(plan, &parts, &loads, &lengths, 0u32, &cursor, t);
    }

    // A lane adds all 16 queries of the warp, or, with groups of 8, each of two lanes 8.
    let chain = Chain {
        counters,
        scratch: global_address::<f32>(unsafe { scratch.as_ptr_unchecked() }),
        part: warp / 4 % comptime!(t.parts() as u32),
        query: warp % 4 * 16 + warp / 4 * comptime!(t.dq_query_offset() as u32) + lane % 2 * 8,
        done: RuntimeCell::<u32>::new(0u32),
        open_counter: RuntimeCell::<u32>::new(0u32),
        open_visits: RuntimeCell::<u32>::new(0u32),
        started: RuntimeCell::<u32>::new(0u32),
    };
    let numbers = Numbers {
        scale,
        log2_scale,
        softcap,
        cap_scale,
    };
    if comptime!(t.persistent) {
        let mut turn = 0u32;
        let mut s = Vector::<f32, S>::zeroed();
        while noted(base, turn, t).rank != NONE {
            let own = noted(base, turn, t);
            s = compute_tile::<S, P, O, C>(
                plan, out, &args, &parts, &listing, &lengths, &loads, &cursor, &chain, &numbers,
                tickets, &own, turn, s, t,
            );
            turn += 1;
        }
    } else {
        let own = tile_of_launch(plan, &parts, &lengths, CUBE_POS_X, t);
        let none = Vector::<f32, S>::zeroed();
        compute_tile::<S, P, O, C>(
            plan, out, &args, &parts, &listing, &lengths, &loads, &cursor, &chain, &numbers,
            tickets, &own, 0u32, none, t,
        );
    }

    if unit() % 32 < comptime!(t.counters() as u32) {
        close(&chain);
    }
}

/// Computes the cube's `turn`-th tile. With `chain.started` `s` are the products of its first step; so are those that it returns,
/// of the next tile.
#[cube]
fn compute_tile<S: Size, P: Size, O: Size, C: Size>(
    plan: &[u32],
    out: &mut [Vector<u32, Four>],
    args: &ComptimeOption<PairArgs>,
    parts: &PlanParts,
    listing: &Listing,
    lengths: &Lengths,
    loads: &Loads,
    cursor: &Cursor,
    chain: &Chain,
    numbers: &Numbers,
    tickets: u64,
    own: &Own,
    turn: u32,
    s: Vector<f32, S>,
    #[comptime] t: BackwardTile,
) -> Vector<f32, S> {
    let base = loads.base;
    let batch = own.batch;
    let first_head = own.kv_head * lengths.heads_per_kv;
    let heads_at = parts.heads + batch as usize * parts.batch;
    // That of the tile after the next one, on its way while this one is computed.
    let mut ticket = 0u32;
    let before = chain.done.read();
    if comptime!(t.persistent) {
        if unit() == 0 {
            ticket = CUBE_COUNT_X + draw(tickets);
        }
        cursor.ahead.store(0u32);
        if cursor.loaded.read() == chain.done.read() {
            load_next(plan, parts, loads, lengths, turn, cursor, t);
        }
    }
    let q_address = base + comptime!(t.q_offset() as u32);
    let do_address = base + comptime!(t.do_offset() as u32);
    let width = S::value();
    let mut grad_k = Vector::<f32, O>::zeroed();
    let mut grad_v = Vector::<f32, O>::zeroed();
    // Keys, and behind them values.
    let own_at = own_address(base, turn, t);
    wait_for_own(base, turn, t);
    let mut s_next = s;
    if chain.started.read() == 0 {
        let stage = chain.done.read() % comptime!(t.stages as u32);
        if cursor.loaded.read() > chain.done.read() {
            let parity = (chain.done.read() / comptime!(t.stages as u32)) & 1;
            barrier_wait(base + comptime!(t.full()) + stage * 8, parity);
        }
        let s_started = start::<S>(own_at, q_address + stage * comptime!(t.b_bytes() as u32), t);
        s_next = wait::<S>(s_started, 0usize, width);
    }
    let rows = rows_of_unit(plan, own.rows, listing, t);
    for of_group in 0..lengths.heads_per_kv {
        let head = first_head + of_group;
        let of_head = options_of(args, batch, head, comptime!(t.pairs()));
        let mut first_entry = own.entry as usize;
        let mut steps = own.steps;
        if of_group > 0 {
            let record = record_of(plan, parts, heads_at, head, own.rank);
            first_entry = parts.entries + plan[record] as usize * 3;
            steps = plan[record + 1];
        }
        let steps = uniform(steps);
        let first_query = (batch * loads.heads + head) * lengths.pitch;
        for j in 0..steps {
            let done = chain.done.read();
            let stage = done % comptime!(t.stages as u32);
            let offset = stage * comptime!(t.b_bytes() as u32);
            let step = first_entry + (j * comptime!(t.entries() as u32 * 3)) as usize;
            let mut s = s_next;
            let mut capped = s_next;
            if comptime!(t.options.biased()) {
                // Before dp has its registers, which biases need for a while.
                s = soften::<S>(s_next, numbers, t);
                capped = s;
                s = add_biases::<S>(
                    s,
                    numbers.cap_scale,
                    args,
                    &of_head,
                    &rows,
                    plan,
                    step,
                    listing,
                    comptime!(t.pairs()),
                );
            }
            let dp_started = start::<S>(
                own_at + comptime!(t.a_bytes() as u32),
                do_address + offset,
                t,
            );
            // Which queries the unit adds dQ to, should it be one of the two.
            let word = step + (chain.query / comptime!(t.group as u32) * 3) as usize;
            let masked = plan[step + 2] & MASKED_STEP;
            let visit = plan[word + 2] & NO_VISIT;
            let row_of_scratch = first_query
                + plan[word] * comptime!(t.group as u32)
                + chain.query % comptime!(t.group as u32);
            load_next(plan, parts, loads, lengths, turn, cursor, t);
            let kept = kept_pairs(
                args,
                &of_head,
                &rows,
                plan,
                step,
                listing,
                comptime!(t.pairs()),
            );

            if comptime!(!t.options.biased()) {
                s = soften::<S>(s_next, numbers, t);
                capped = s;
            }
            if masked != 0 {
                let lane = unit() % 32;
                let row = unit() / 32 * 16 + lane / 4;
                s = mask::<S>(
                    s,
                    plan,
                    parts.masks,
                    first_entry,
                    j,
                    row,
                    (lane % 4) * 2,
                    comptime!(t.mask()),
                );
            }
            let stats_at = base
                + comptime!(t.stats_offset() as u32)
                + stage * comptime!(t.stats_bytes() as u32)
                + (unit() % 4) * 16;
            let mut p = Vector::<f32, S>::zeroed();
            #[unroll]
            for eight in 0..comptime!(t.cols / 8) {
                let four = shared_load_four(stats_at + comptime!(t.stats_eight(eight)));
                #[unroll]
                for i in 0..4usize {
                    let at = comptime!(4 * eight + i);
                    let lse = four.extract(comptime!(i % 2 * 2));
                    p.insert(
                        at,
                        exp2(multiply_add(s.extract(at), numbers.log2_scale, -lse)),
                    );
                }
            }
            let weights = pack_all::<S, P>(p, t.half);
            let mut left = weights;
            if comptime!(t.options.dropout) {
                left = pack_all::<S, P>(drop_out::<S>(p, &kept, comptime!(t.options)), t.half);
            }
            // Depth-major for s and dp, dim-major for dK, dV and dQ: the same bytes.
            let do_wide = descriptor(do_address + offset, comptime!(t.cols * ROW));
            let grad_v_started = accumulate::<P, O>(grad_v, left, do_wide, t.half, t.dim);
            let mut ds = wait::<S>(dp_started, 1usize, width);
            #[unroll]
            for eight in 0..comptime!(t.cols / 8) {
                let four = shared_load_four(stats_at + comptime!(t.stats_eight(eight)));
                #[unroll]
                for i in 0..4usize {
                    let at = comptime!(4 * eight + i);
                    let delta = four.extract(comptime!(i % 2 * 2 + 1));
                    let mut weight = p.extract(at);
                    if comptime!(t.packed()) {
                        weight = unpack(
                            weights.extract(comptime!(at / 2)),
                            comptime!(at % 2 == 1),
                            t.half,
                        );
                    }
                    let dp = drop_gradient(ds.extract(at), delta, &kept, args, at, t.options);
                    ds.insert(at, weight * dp);
                }
            }
            if comptime!(t.softcap) {
                #[unroll]
                for i in 0..S::value() {
                    let ratio = capped.extract(i) / numbers.softcap;
                    ds.insert(i, ds.extract(i) * (1.0f32 - ratio * ratio));
                }
            }
            let left = pack_all::<S, P>(ds, t.half);
            let other = (done & 1) * comptime!(t.ds_bytes() as u32);
            let ds_address = base + comptime!(t.ds_offset() as u32) + other;
            store_left::<P>(left, swizzled(ds_address), comptime!(t.rows() * ROW));
            let counter = row_of_scratch / comptime!(t.counted() as u32)
                * comptime!(t.parts() as u32)
                + chain.part;
            let mut seen = 0u32;
            if unit() % 32 < comptime!(t.counters() as u32) {
                seen = peek(chain.counters + u64::cast_from(counter) * 4);
            }
            async_fence();
            named_sync(1u32, comptime!(t.units() as u32));
            // Which columns, or which queries, are this warpgroup's.
            let group = uniform(unit() / 128);
            let ds_wide = descriptor(
                ds_address + group * comptime!(t.dq_left_offset() as u32),
                comptime!(t.rows() * ROW),
            );
            let k_wide = descriptor(
                own_at + group * comptime!(t.dq_right_offset() as u32),
                comptime!(t.rows() * ROW),
            );
            let dq_started = wide_product::<C>(ds_wide, k_wide, t.half, comptime!(t.rows()));
            let grad_k_started = accumulate_shared::<O>(
                grad_k,
                descriptor(ds_address + group * comptime!((64 * ROW) as u32), 16usize),
                descriptor(q_address + offset, comptime!(t.cols * ROW)),
                t.half,
                t.dim,
                t.cols,
                comptime!(t.rows() * ROW),
            );
            let next_stage = (done + 1) % comptime!(t.stages as u32);
            let mut its_own = own_at;
            if cursor.loaded.read() > done + 1 {
                let parity = ((done + 1) / comptime!(t.stages as u32)) & 1;
                barrier_wait(base + comptime!(t.full()) + next_stage * 8, parity);
                if comptime!(t.persistent) {
                    if cursor.ahead.read() != 0 {
                        its_own = own_address(base, turn + 1, t);
                        wait_for_own(base, turn + 1, t);
                    }
                }
                chain.started.store(1u32);
            } else {
                chain.started.store(0u32);
            }
            // After the last step of whatever is there, for nobody.
            let s_started = start::<S>(
                its_own,
                q_address + next_stage * comptime!(t.b_bytes() as u32),
                t,
            );
            if comptime!(t.persistent) {
                if unit() == 0 && done == before {
                    note(plan, parts, lengths, base, ticket, turn, t);
                }
            }
            grad_v = wait::<O>(grad_v_started, 3usize, comptime!(t.dim / 2));
            let dq_width = C::value();
            let dq = wait::<C>(dq_started, 2usize, dq_width);

            // What the warp added a step ago is in memory: its tile's turn is over there, and the buffer is free.
            let lane = unit() % 32;
            if lane < comptime!(t.counters() as u32) {
                close(chain);
            }
            sync_warp();
            chain.open_counter.store(counter);
            chain
                .open_visits
                .store(select(visit == NO_VISIT, 0u32, visit + 1));
            let source = base
                + comptime!(t.dq_offset() as u32)
                + uniform(unit() / 32) * comptime!(2 * t.warp_eight_bytes() as u32);
            store_sixteen::<C>(dq, source + lane * 16, comptime!(t.warp_eight_bytes()));
            async_fence();
            sync_warp();
            if lane < comptime!(t.counters() as u32) {
                if visit != NO_VISIT {
                    if seen != visit {
                        wait_until(chain.counters + u64::cast_from(counter) * 4, visit);
                    }
                    let bytes = comptime!(t.warp_eight_bytes() * 2 / t.counters());
                    let target = chain.scratch
                        + u64::cast_from(row_of_scratch / 16)
                            * comptime!(2 * t.dq_eight_bytes() as u64)
                        + u64::cast_from(
                            (chain.part * 2 + row_of_scratch % 16 / 8)
                                * comptime!(t.warp_eight_bytes() as u32),
                        );
                    let source = source + lane * comptime!(bytes as u32);
                    if visit == 0 {
                        bulk_store(target, source, bytes, false);
                    } else {
                        bulk_store(target, source, bytes, true);
                    }
                }
                bulk_commit();
            }

            grad_k = wait::<O>(grad_k_started, 1usize, comptime!(t.dim / 2));
            if lane == 0 {
                barrier_arrive(base + comptime!(t.empty()) + stage * 8);
            }
            s_next = wait::<S>(s_started, 0usize, width);
            chain.done.store(done + 1);
        }
    }

    if comptime!(t.persistent) {
        if unit() == 0 && chain.done.read() == before {
            note(plan, parts, lengths, base, ticket, turn, t);
        }
        // All have read the tile's keys and values: they make room for those of the tile after the next one.
        named_sync(1u32, comptime!(t.units() as u32));
        let after_next = noted(base, turn, t);
        if after_next.rank != NONE {
            load_tile(plan, loads, &after_next, turn, t);
        }
    }
    // Found again rather than kept: registers are short.
    let own = found_again(plan, parts, lengths, own, t);
    let lane = unit() % 32;
    let row = unit() / 32 * 16 + lane / 4;
    let first = (own.batch * lengths.kv_heads + own.kv_head) * lengths.seq_kv;
    let place = place_of(plan, own.rows, row, t);
    let place8 = place_of(plan, own.rows, row + 8, t);
    let len = lengths.seq_kv;
    store_rows::<O>(
        out,
        &grad_k,
        0u32,
        first,
        place,
        place8,
        listing,
        len,
        lane,
        numbers.scale,
        comptime!(t.store()),
    );
    store_rows::<O>(
        out,
        &grad_v,
        lengths.second,
        first,
        place,
        place8,
        listing,
        len,
        lane,
        factor_of(args, comptime!(t.options)),
        comptime!(t.store()),
    );
    s_next
}

/// Softcaps products, where they are to be.
#[cube]
fn soften<S: Size>(
    s_in: Vector<f32, S>,
    numbers: &Numbers,
    #[comptime] t: BackwardTile,
) -> Vector<f32, S> {
    let mut s = s_in;
    if comptime!(t.softcap) {
        #[unroll]
        for i in 0..S::value() {
            // tanh x = 1 − 2 / (1 + exp 2x); PTX's tanh has but eleven bits.
            let e = exp2(s.extract(i) * numbers.cap_scale);
            s.insert(
                i,
                multiply_add(
                    -2.0f32 * numbers.softcap,
                    reciprocal(1.0f32 + e),
                    numbers.softcap,
                ),
            );
        }
    }
    s
}

/// The positions of the unit's keys, where something depends on them.
#[cube]
fn rows_of_unit(
    plan: &[u32],
    rows: u32,
    listing: &Listing,
    #[comptime] t: BackwardTile,
) -> UnitRows {
    let mut upper = 0u32;
    let mut lower = 0u32;
    if comptime!(t.options.any()) {
        let row = unit() / 32 * 16 + unit() % 32 / 4;
        upper = place_of(plan, rows, row, t);
        lower = place_of(plan, rows, row + 8, t);
    }
    unit_rows(upper, lower, listing, comptime!(t.pairs()))
}

/// The tile that a cube is at, if it is its only one.
#[cube]
fn found_again(
    plan: &[u32],
    parts: &PlanParts,
    lengths: &Lengths,
    own: &Own,
    #[comptime] t: BackwardTile,
) -> Own {
    if comptime!(t.persistent) {
        Own {
            rank: own.rank,
            kv_head: own.kv_head,
            batch: own.batch,
            rows: own.rows,
            entry: own.entry,
            steps: own.steps,
        }
    } else {
        tile_of_launch(plan, parts, lengths, uniform(CUBE_POS_X), t)
    }
}

/// Where the keys of the cube's `turn`-th tile are, and behind them the values.
#[cube]
fn own_address(base: u32, turn: u32, #[comptime] t: BackwardTile) -> u32 {
    let mut at = base + comptime!(t.k_offset() as u32);
    if comptime!(t.persistent) {
        at += (turn & 1) * comptime!(2 * t.a_bytes() as u32);
    }
    at
}

/// Waits for the keys and values of the cube's `turn`-th tile.
#[cube]
fn wait_for_own(base: u32, turn: u32, #[comptime] t: BackwardTile) {
    if comptime!(t.persistent) {
        barrier_wait(base + comptime!(t.own()) + (turn & 1) * 8, (turn / 2) & 1);
    } else {
        barrier_wait(base + comptime!(t.own()), 0u32);
    }
}

/// What the additions that the unit started last belong to is told that they are done: then they are in memory, and their
/// buffer is free.
#[cube]
fn close(chain: &Chain) {
    bulk_wait();
    if chain.open_visits.read() != 0 {
        post(
            chain.counters + u64::cast_from(chain.open_counter.read()) * 4,
            chain.open_visits.read(),
        );
    }
}

/// The numbers that scores are made with.
#[derive(CubeType, Clone, Copy)]
struct Numbers {
    scale: f32,
    log2_scale: f32,
    softcap: f32,
    cap_scale: f32,
}

/// Word of the record of a tile for a query head. All patterns rank tiles alike.
#[cube]
fn record_of(plan: &[u32], parts: &PlanParts, heads_at: usize, head: u32, rank: u32) -> usize {
    parts.order + (plan[heads_at + head as usize] + rank) as usize * 4 + 1
}

/// Loads the keys and values of a tile, to where those of the cube's `turn`-th go.
#[cube]
fn load_tile(plan: &[u32], loads: &Loads, own: &Own, turn: u32, #[comptime] t: BackwardTile) {
    let target = own_address(loads.base, turn, t);
    let mut bar = loads.base + comptime!(t.own());
    if comptime!(t.persistent) {
        bar += (turn & 1) * 8;
    }
    let unit = unit();
    if unit == 0 {
        barrier_expect(bar, comptime!(2 * t.a_bytes()));
    }
    if unit % 32 == 0 {
        // Dealt to the warps: lanes of one warp would wait for each other.
        let mut index = unit / 32;
        while index < comptime!(2 * t.a_boxes() as u32) {
            let mut map = loads.k;
            if index >= comptime!(t.a_boxes() as u32) {
                map = loads.v;
            }
            load_own(
                map,
                plan,
                target,
                bar,
                own.rows,
                index,
                loads.class_len,
                own.kv_head,
                own.batch,
                t,
            );
            index += comptime!(t.warps());
        }
    }
}

/// Where a warp adds its dQ.
#[derive(CubeType)]
struct Chain {
    counters: u64,
    scratch: u64,
    /// Which half of the columns.
    part: u32,
    /// The first of the unit's eight queries of a step.
    query: u32,
    /// Steps the cube has done.
    done: RuntimeCell<u32>,
    /// The counter to be raised when the additions started last are done, and to what.
    open_counter: RuntimeCell<u32>,
    open_visits: RuntimeCell<u32>,
    /// Whether the products of the next step are of its tile's keys.
    started: RuntimeCell<u32>,
}

/// Starts the product of a warpgroup's own 64 rows and a step's.
#[cube]
fn start<S: Size>(own: u32, step: u32, #[comptime] t: BackwardTile) -> Vector<f32, S> {
    let group = uniform(unit() / 128);
    product::<S>(
        descriptor(own + group * comptime!((64 * ROW) as u32), 16usize),
        descriptor(step, 16usize),
        t.half,
        t.dim,
        comptime!(t.rows() * ROW),
        comptime!(t.cols * ROW),
    )
}

/// Where the unit's first pair of ds is. Rows 8 apart are swizzled alike.
#[cube]
fn swizzled(address: u32) -> u32 {
    let unit = unit();
    let lane = unit % 32;
    address + (unit / 32 * 16 + lane / 4) * comptime!(ROW as u32) + lane / 4 * 16 + lane % 4 * 4
}

/// The place of a row of a tile.
#[cube]
fn place_of(plan: &[u32], rows: u32, row: u32, #[comptime] t: BackwardTile) -> u32 {
    own_place(plan, rows, row, comptime!(t.group), comptime!(t.clustered))
}

/// Loads box `index` of those of the tile's keys and values.
#[cube]
fn load_own(
    map: u64,
    plan: &[u32],
    start: u32,
    bar: u32,
    rows: u32,
    index: u32,
    class_len: u32,
    head: u32,
    batch: u32,
    #[comptime] t: BackwardTile,
) {
    let boxes = comptime!(t.a_boxes() as u32);
    let mut start = start;
    if index >= boxes {
        start += comptime!(t.a_bytes() as u32);
    }
    let which = index % boxes;
    let span = which % comptime!(t.spans() as u32);
    let row = which / comptime!(t.spans() as u32) * comptime!(t.a_group() as u32);
    let target = start + span * comptime!((t.rows() * ROW) as u32) + row * comptime!(ROW as u32);
    let place = place_of(plan, rows, row, t);
    load_at(
        map,
        target,
        bar,
        span,
        place,
        class_len,
        head,
        batch,
        comptime!(t.residue),
    );
}

/// What loads are made of.
#[derive(CubeType, Clone, Copy)]
struct Loads {
    k: u64,
    v: u64,
    q: u64,
    grad_out: u64,
    stats: u64,
    base: u32,
    class_len: u32,
    /// Query heads.
    heads: u32,
}

/// The step that is loaded next.
#[derive(CubeType)]
struct Cursor {
    /// Of its tile: the rank, the batch entry,
    rank: RuntimeCell<u32>,
    batch: RuntimeCell<u32>,
    /// the query head, and the one after the tile's last.
    head: RuntimeCell<u32>,
    end: RuntimeCell<u32>,
    /// Word of the head's first entry.
    entry: RuntimeCell<usize>,
    j: RuntimeCell<u32>,
    /// Steps of the head.
    steps: RuntimeCell<u32>,
    /// Steps loaded so far, of all tiles.
    loaded: RuntimeCell<u32>,
    /// Whether it is in the tile after the one that is computed.
    ahead: RuntimeCell<u32>,
}

/// Moves the cursor to the beginning of a tile.
#[cube]
fn turn_to(own: &Own, lengths: &Lengths, cursor: &Cursor) {
    cursor.rank.store(own.rank);
    cursor.batch.store(own.batch);
    cursor.head.store(own.kv_head * lengths.heads_per_kv);
    cursor.end.store((own.kv_head + 1) * lengths.heads_per_kv);
    cursor.entry.store(own.entry as usize);
    cursor.j.store(0u32);
    cursor.steps.store(uniform(own.steps));
}

/// Reads the record of the cursor's head.
#[cube]
fn open(plan: &[u32], parts: &PlanParts, cursor: &Cursor) {
    let heads_at = parts.heads + cursor.batch.read() as usize * parts.batch;
    let record = record_of(
        plan,
        parts,
        heads_at,
        cursor.head.read(),
        cursor.rank.read(),
    );
    cursor
        .entry
        .store(parts.entries + plan[record] as usize * 3);
    cursor.j.store(0u32);
    cursor.steps.store(uniform(plan[record + 1]));
}

/// Moves the cursor to the next head of its tile that has a step.
#[cube]
fn skip_to_step(plan: &[u32], parts: &PlanParts, cursor: &Cursor) {
    while cursor.j.read() >= cursor.steps.read() && cursor.head.read() + 1 < cursor.end.read() {
        cursor.head.store(cursor.head.read() + 1);
        open(plan, parts, cursor);
    }
}

/// Loads the cursor's step, if there is one, once its buffer is free: of the tile that is computed, the cube's `turn`-th, or else
/// of the one after it. All units call this together.
#[cube]
fn load_next(
    plan: &[u32],
    parts: &PlanParts,
    loads: &Loads,
    lengths: &Lengths,
    turn: u32,
    cursor: &Cursor,
    #[comptime] t: BackwardTile,
) {
    skip_to_step(plan, parts, cursor);
    if comptime!(t.persistent) {
        if cursor.j.read() >= cursor.steps.read() && cursor.ahead.read() == 0 {
            let next = noted(loads.base, turn + 1, t);
            if next.rank != NONE {
                cursor.ahead.store(1u32);
                turn_to(&next, lengths, cursor);
                skip_to_step(plan, parts, cursor);
            }
        }
    }
    if cursor.j.read() < cursor.steps.read() {
        let boxes = comptime!((t.entries() * t.spans()) as u32);
        let all = comptime!((2 * t.entries() * t.spans() + t.entries()) as u32);
        let stage = cursor.loaded.read() % comptime!(t.stages as u32);
        let parity = (cursor.loaded.read() / comptime!(t.stages as u32)) & 1;
        let full = loads.base + comptime!(t.full()) + stage * 8;
        // Which of the step's boxes the unit loads: those of q, then of dO, then the stats.
        let unit = unit();
        let index = unit / 32 + unit % 32 * comptime!(t.warps());
        if index < all {
            barrier_wait(loads.base + comptime!(t.empty()) + stage * 8, 1 - parity);
            if index == 0 {
                barrier_expect(full, comptime!(2 * t.b_bytes() + 8 * t.cols));
            }
            let mut which = index % boxes;
            let span = which % comptime!(t.spans() as u32);
            which /= comptime!(t.spans() as u32);
            if index >= 2 * boxes {
                which = index - 2 * boxes;
            }
            let word = cursor.entry.read()
                + ((cursor.j.read() * comptime!(t.entries() as u32) + which) * 3) as usize;
            let at = plan[word] * comptime!(t.group as u32);
            if index >= 2 * boxes {
                let target = loads.base
                    + comptime!(t.stats_offset() as u32)
                    + stage * comptime!(t.stats_bytes() as u32)
                    + which * comptime!((t.group * 8).max(128) as u32);
                load_line(
                    loads.stats,
                    target,
                    full,
                    at * 2,
                    cursor.batch.read() * loads.heads + cursor.head.read(),
                );
            } else {
                let mut map = loads.q;
                let mut start = loads.base + comptime!(t.q_offset() as u32);
                if index >= boxes {
                    map = loads.grad_out;
                    start = loads.base + comptime!(t.do_offset() as u32);
                }
                let target = start
                    + stage * comptime!(t.b_bytes() as u32)
                    + span * comptime!((t.cols * ROW) as u32)
                    + which * comptime!((t.group * ROW) as u32);
                load_at(
                    map,
                    target,
                    full,
                    span,
                    at,
                    loads.class_len,
                    cursor.head.read(),
                    cursor.batch.read(),
                    comptime!(t.residue),
                );
            }
        }
        cursor.j.store(cursor.j.read() + 1);
        cursor.loaded.store(cursor.loaded.read() + 1);
    }
}

/// `stats[head, place] = (lse · log2 e, delta)`, `delta = rowsum(dO ∘ O) − dlse`: what the kernel needs of the query at each place, and
/// zeros in its counters. Rows without keys get lse and delta 0, so that no infinity enters the arithmetic; places of no
/// position get zeros. A unit has eight columns of a row, `lanes` units a row.
#[cube(launch_unchecked)]
pub fn stats(
    out: &[Vector<u32, Const<4>>],
    grad_out: &[Vector<u32, Const<4>>],
    lse: &[f32],
    grad_lse: ComptimeOption<Box<[f32]>>,
    stats: &mut [f32],
    counters: &mut [u32],
    grad_strides: Strides,
    listing: Listing,
    heads: u32,
    rows: u32,
    pitch: u32,
    #[comptime] lanes: u32,
    #[comptime] t: BackwardTile,
) {
    let index = ABSOLUTE_POS as u32;
    let row = index / lanes;
    let eight = index % lanes;
    let place = row % pitch;
    let position = position_of(place as usize, &listing, comptime!(t.residue));
    let head = (row / pitch % heads) as usize;
    let batch = (row / pitch / heads) as usize;
    let exists = row < rows && position < grad_strides.len;
    let out_row = (batch * heads as usize + head) * grad_strides.len + position;
    let mut sum = f32::new(0.0);
    if exists && eight < comptime!(t.dim as u32 / 8) {
        let a = out[out_row * comptime!(t.dim / 8) + eight as usize];
        let b = grad_out[batch * grad_strides.batch
            + head * grad_strides.head
            + position * grad_strides.row
            + eight as usize];
        #[unroll]
        for i in 0..4usize {
            let (x, y) = (a.extract(i), b.extract(i));
            sum = multiply_add(unpack(x, false, t.half), unpack(y, false, t.half), sum);
            sum = multiply_add(unpack(x, true, t.half), unpack(y, true, t.half), sum);
        }
    }
    sum += shuffle_xor(sum, 1u32);
    sum += shuffle_xor(sum, 2u32);
    sum += shuffle_xor(sum, 4u32);
    if comptime!(lanes > 8) {
        sum += shuffle_xor(sum, 8u32);
    }
    if row < rows && eight == 0 {
        let mut log = f32::new(0.0);
        if exists {
            log = lse[out_row];
        }
        // Half of the least number there is.
        let none = log < f32::new(LOW);
        #[comptime]
        match grad_lse {
            ComptimeOption::Some(grad_lse) => {
                if exists {
                    sum -= select(none, f32::new(0.0), grad_lse[out_row]);
                }
            }
            ComptimeOption::None => {}
        }
        stats[(row * 2) as usize] = select(
            none,
            f32::new(0.0),
            log * comptime!(std::f32::consts::LOG2_E),
        );
        stats[(row * 2 + 1) as usize] = sum;
        clear(counters, row, rows, t);
    }
}

/// As [`stats`], from those of a part before, which has positions in order, `known_pitch` of each head.
#[cube(launch_unchecked)]
pub fn relist(
    known: &[Vector<f32, Const<2>>],
    stats: &mut [Vector<f32, Const<2>>],
    counters: &mut [u32],
    listing: Listing,
    rows: u32,
    pitch: u32,
    known_pitch: u32,
    seq_q: u32,
    #[comptime] t: BackwardTile,
) {
    let row = ABSOLUTE_POS as u32;
    let position = position_of((row % pitch) as usize, &listing, comptime!(t.residue)) as u32;
    if row < rows {
        let mut pair = Vector::<f32, Const<2>>::zeroed();
        if position < seq_q {
            pair = known[(row / pitch * known_pitch + position) as usize];
        }
        stats[row as usize] = pair;
        clear(counters, row, rows, t);
    }
}

/// Zeros the counters that begin at a row, and with the first row that of tickets.
#[cube]
fn clear(counters: &mut [u32], row: u32, rows: u32, #[comptime] t: BackwardTile) {
    let parts = comptime!(t.parts() as u32);
    let counted = comptime!(t.counted() as u32);
    if row % counted < parts {
        counters[(row / counted * parts + row % counted) as usize] = 0u32;
    }
    if row == 0 {
        counters[(rows / counted * parts) as usize] = 0u32;
    }
}

/// dQ `[batch, heads, seq_q, dim]` from the sums: a unit makes eight columns of a row. Queries nobody visited get zeros. With
/// `carry` dQ is added to what is there.
#[cube(launch_unchecked)]
pub fn finish(
    scratch: &[Vector<f32, Const<2>>],
    counters: &[u32],
    out: &mut [Vector<u32, Const<4>>],
    listing: Listing,
    rows: u32,
    pitch: u32,
    seq_q: u32,
    scale: f32,
    #[comptime] t: BackwardTile,
) {
    let index = ABSOLUTE_POS as u32;
    let eights = comptime!(t.dim as u32 / 8);
    let row = index / eights;
    let eight = index % eights;
    let position = position_of((row % pitch) as usize, &listing, comptime!(t.residue));
    if row < rows && position < seq_q as usize {
        let part = eight / comptime!((t.padded() / 8 / t.parts()) as u32);
        let counter = row / comptime!(t.counted() as u32) * comptime!(t.parts() as u32) + part;
        let target =
            ((row / pitch * seq_q) as usize + position) * comptime!(t.dim / 8) + eight as usize;
        let mut made = Vector::<u32, Const<4>>::zeroed();
        if comptime!(t.carry) {
            made = out[target];
        }
        let source = (row / 16) as usize * comptime!(t.dq_eight_bytes() / 4)
            + ((part * 2 + row % 16 / 8) * comptime!((t.warp_eight_bytes() / 8) as u32)
                + eight % comptime!((t.padded() / 8 / t.parts()) as u32) / 2 * 64
                + row % 8 * 8
                + eight % 2) as usize;
        if counters[counter as usize] != 0 {
            #[unroll]
            for i in 0..4usize {
                let pair = scratch[source + comptime!(2 * i)];
                let mut low = pair.extract(0usize) * scale;
                let mut high = pair.extract(1usize) * scale;
                if comptime!(t.carry) {
                    low += unpack(made.extract(i), false, t.half);
                    high += unpack(made.extract(i), true, t.half);
                }
                made.insert(i, pack(low, high, t.half));
            }
        }
        out[target] = made;
    }
}
