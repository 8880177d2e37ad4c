//! The backward kernel: dQ, dK and dV in one loop over columns. A cube has a tile of keys, with 64 per warpgroup, and loops over the queries that attend to
//! the tile.
//!
//! ```text
//!            s  = k · qᵀ     p  = exp2(s · log2_scale − lse)     64 keys × `cols` queries per warpgroup, so transposed
//!            dp = v · dOᵀ    ds = p ∘ (dp − delta)
//!
//! all warps  TMA:  q, dO, stats of step j + stages − lag         gathered boxes of `group` rows
//! every warpgroup, per step j:
//!     dp                wgmma, started; s was started in step j − 1
//!     s done:           p, as a left operand in registers, while dp is computed
//!     dV += p · dO      wgmma, started
//!     dp done:          ds, as a left operand in registers, and in shared memory as [keys][queries]
//!     dK += ds · q      wgmma, started, if head_dim is above 64: ds from registers
//!     barrier           all warpgroups have stored ds
//!     dQ  = dsᵀ · k     wgmma, started, over all keys of the tile; each warpgroup computes half the columns (or half the queries)
//!     dK += ds · q      wgmma, started, if head_dim is at most 64: ds from shared memory
//!     s of step j + 1   wgmma, started
//!     dQ done:          wait for the turn of this tile, then add to the scratch
//!     dK, s done        no product is in flight at the end of an iteration, or ptxas would serialise all products
//! ```
//!
//! With a threshold, dp starts after p. If no weight of the tile and the step's queries is above `exp(−threshold)`, only the visit and s of the next step
//! remain of the step.
//!
//! The scratch is f32, and all tiles of a head add to it. Tiles add to the same 16 queries in launch order: the plan has the number of earlier visits, and
//! a counter the number of completed ones. A tile waits only for tiles launched before it, so the first running tile never waits. With `apart`, tiles that
//! are much longer than the others have a second scratch. Each warp has its own 16 queries, and so a separate chain. The first visitor stores, so only the
//! counters must be zeroed. The last one computes dQ from the sums, or [`finish`](super::backward_stats::finish) does.
//!
//! With `persistent`, a cube computes tile after tile. It draws the next ones from a counter, holds the keys and values of two, and computes the first s of
//! the next tile along with the last dQ of the current one.
//!
//! The scratch has the layout of wgmma's results, from outer to inner: 16 queries, part of the columns, 8 of the queries, 16 columns, and the four elements
//! of each lane.

// Compile-time conditions stay separate from run-time ones, and kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::backward_chain::{Chain, add_queries, close, visit_of};
use super::backward_loads::*;
use super::bits::*;
use super::dropout::*;
use super::gradient::{StoredRows, mask};
use super::options::*;
use super::rows::{own_places, pack_all};
use super::score_gradient::*;
use super::shares::store_gradient;
use super::tiles::BackwardTile;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, Listing, MainloopOperands, PlanParts, PlanWords};
use crate::shared::score::ScoreScalars;
use blocksparse::plan::MASKED_STEP;

impl BackwardTile {
    fn weights(&self) -> WeightShape {
        WeightShape {
            base: self.base,
            stats_eight: self.stats_eight(1),
            packed: self.packed(),
        }
    }
}

/// `operands` are tensor maps `[batch, heads, seq, dim]` of `k`, `v`, `q` and `grad_out`, or with `residue` `[batch, heads, stride, seq / stride, dim]`.
/// `stats` is a map `[batch · heads, pitch, 2]` of `lse · log2 e` and delta of the query at each place. `scratch` is described above. `counters` has one
/// per 16 queries (8 if groups have no more) and half of the columns. `out` is `[batch, kv_heads, seq_kv, dim]` in vectors of eight elements, with dV from
/// vector `second` on. With `carry`, dK and dV are added to it. If cubes share the queries of a tile, `out` gets their sums: see [`shares`](super::shares).
/// If biases are added to scores that are not softcapped, `cap_scale` is the scale.
#[cube(launch_unchecked)]
pub fn backward<S: Size, P: Size, O: Size, C: Size>(
    operands: MainloopOperands<TensorMap<u32, Tiled>>,
    stats: &TensorMap<f32, Tiled>,
    scratch: &mut [f32],
    counters: &mut [u32],
    out: &mut [Vector<u32, Four>],
    grad_q: &mut [Vector<u32, Four>],
    parts: PlanParts,
    plan: PlanWords,
    args: ComptimeOption<PairArgs>,
    lengths: Lengths,
    numbers: ScoreScalars,
    #[comptime] t: BackwardTile,
) {
    let words = &plan.words[..];
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let counters = global_address::<u32>(&*counters);
    let tickets = counters + u64::cast_from(lengths.counters) * 4;

    if UNIT_POS_X == 0 {
        #[unroll]
        for i in 0..comptime!(t.own_buffers()) {
            barrier_init(base + comptime!(t.own() + 8 * i as u32), 1u32);
        }
        let full = base + comptime!(t.full());
        let empty = base + comptime!(t.empty());
        ring_init(full, empty, t.stages, comptime!(t.warps()));
        if comptime!(t.persistent) {
            cache_tile(words, &parts, &lengths, base, CUBE_POS_X, 0u32, t);
            let second = CUBE_COUNT_X + draw(tickets);
            cache_tile(words, &parts, &lengths, base, second, 1u32, t);
        }
    }
    sync_cube();

    let loads = Loads {
        k: tensor_map_address(&operands.a1),
        v: tensor_map_address(&operands.a2),
        q: tensor_map_address(&operands.b1),
        grad_out: tensor_map_address(&operands.b2),
        stats: tensor_map_address(stats),
        base,
        class_len: plan.listing.class_len as u32,
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
        let own = cached_tile(base, 0u32, t);
        load_tile(words, &loads, &own, 0u32, t);
        turn_to(&own, &lengths, &cursor, t);
        let next = cached_tile(base, 1u32, t);
        if next.rank != NONE {
            load_tile(words, &loads, &next, 1u32, t);
        }
    } else {
        let own = tile_of_launch(words, &parts, &lengths, CUBE_POS_X, t);
        load_tile(words, &loads, &own, 0u32, t);
        turn_to(&own, &lengths, &cursor, t);
    }
    #[unroll]
    for _ in 0..comptime!(t.stages - t.lag) {
        load_next(words, &parts, &loads, &lengths, 0u32, &cursor, t);
    }

    // One lane adds all 16 queries of the warp. With groups of 8, two lanes add 8 each.
    let chain = Chain {
        counters,
        tickets,
        scratch: global_address::<f32>(&*scratch),
        part: warp / 4 % comptime!(t.parts() as u32),
        query: warp % 4 * 16 + warp / 4 * comptime!(t.dq_query_offset() as u32) + lane % 2 * 8,
        done: RuntimeCell::<u32>::new(0u32),
        open_counter: RuntimeCell::<u32>::new(0u32),
        open_visits: RuntimeCell::<u32>::new(0u32),
        started: RuntimeCell::<u32>::new(0u32),
    };
    if comptime!(t.persistent) {
        let mut turn = 0u32;
        let mut s = Vector::<f32, S>::zeroed();
        while cached_tile(base, turn, t).rank != NONE {
            let own = cached_tile(base, turn, t);
            s = compute_tile::<S, P, O, C>(
                out, grad_q, &parts, &plan, &args, &lengths, &loads, &cursor, &chain, &numbers,
                &own, turn, s, t,
            );
            turn += 1;
        }
    } else {
        let own = tile_of_launch(words, &parts, &lengths, CUBE_POS_X, t);
        let none = Vector::<f32, S>::zeroed();
        compute_tile::<S, P, O, C>(
            out, grad_q, &parts, &plan, &args, &lengths, &loads, &cursor, &chain, &numbers, &own,
            0u32, none, t,
        );
    }

    if unit() % 32 < comptime!(t.counters() as u32) {
        close(&chain, t);
    }
}

/// Computes the cube's `turn`-th tile. If `chain.started`, `s` has the products of its first step. Returns those of the next tile's first step.
#[cube]
fn compute_tile<S: Size, P: Size, O: Size, C: Size>(
    out: &mut [Vector<u32, Four>],
    grad_q: &mut [Vector<u32, Four>],
    parts: &PlanParts,
    plan: &PlanWords,
    args: &ComptimeOption<PairArgs>,
    lengths: &Lengths,
    loads: &Loads,
    cursor: &Cursor,
    chain: &Chain,
    numbers: &ScoreScalars,
    own: &OwnTile,
    turn: u32,
    s: Vector<f32, S>,
    #[comptime] t: BackwardTile,
) -> Vector<f32, S> {
    let words = &plan.words[..];
    let weight_shape = comptime!(t.weights());
    let base = loads.base;
    let batch = own.batch;
    let first_head = first_head(lengths, own.kv_head, own.share, t);
    let heads_at = parts.heads + batch as usize * parts.batch;
    // The ticket of the tile after the next one, drawn while this one is computed.
    let mut ticket = 0u32;
    let before = chain.done.read();
    if comptime!(t.persistent) {
        if unit() == 0 {
            ticket = CUBE_COUNT_X + draw(chain.tickets);
        }
        cursor.ahead.store(0u32);
        if cursor.loaded.read() == chain.done.read() {
            load_next(words, parts, loads, lengths, turn, cursor, t);
        }
    }
    let q_address = base + comptime!(t.q_offset() as u32);
    let do_address = base + comptime!(t.do_offset() as u32);
    let width = S::value();
    let mut grad_k = Vector::<f32, O>::zeroed();
    let mut grad_v = Vector::<f32, O>::zeroed();
    // Keys, followed by values.
    let own_at = own_address(base, turn, t);
    wait_for_own(base, turn, t);
    let mut s_next = first_products::<S>(s, own_at, q_address, base, cursor, chain, t);
    let rows = rows_of_unit(plan, own.rows, t.base);
    let of_rows = no_row_stats();
    for of_group in 0..heads_of_cube(lengths, t) {
        let head = first_head + of_group;
        let of_head = options_of(args, batch, head, t.base);
        let mut first_entry = own.entry as usize;
        let mut steps = own.steps;
        if of_group > 0 {
            let record = record_of(words, parts, heads_at, head, own.rank);
            first_entry = parts.entries + words[record] as usize * comptime!(t.entry_words());
            steps = words[record + 1];
        }
        let steps = uniform(steps);
        let mut first_query = (batch * loads.heads + head) * lengths.pitch;
        if comptime!(t.apart) {
            if own.rank < lengths.apart {
                first_query += lengths.rows;
            }
        }
        for j in 0..steps {
            let done = chain.done.read();
            let stage = done % comptime!(t.stages as u32);
            let offset = stage * comptime!(t.b_bytes() as u32);
            let step =
                first_entry + (j * comptime!((t.entries() * t.entry_words()) as u32)) as usize;
            let mut s = s_next;
            let mut capped = s_next;
            if comptime!(t.score.biased()) {
                // Before dp occupies its registers, which biases need temporarily.
                s = softcapped::<S>(s_next, numbers, t);
                capped = s;
                s = add_biases::<S>(
                    s,
                    numbers.cap_scale,
                    args,
                    &of_head,
                    &rows,
                    plan,
                    step,
                    t.base,
                );
            }
            let (v_at, do_at) = (own_at + comptime!(t.a_bytes() as u32), do_address + offset);
            let mut dp_started = Vector::<f32, S>::zeroed();
            if comptime!(!t.score.threshold) {
                dp_started = start::<S>(v_at, do_at, t);
            }
            // Queries to which the unit adds dQ, if it is one of the adding lanes.
            let word = step
                + (chain.query / comptime!(t.group as u32) * comptime!(t.entry_words() as u32))
                    as usize;
            let masked = words[step + 2] & MASKED_STEP;
            let visit = words[word + 2];
            let blocks = kept_blocks(words, step, t.base);
            let row_of_scratch = first_query
                + words[word] * comptime!(t.group as u32)
                + chain.query % comptime!(t.group as u32);
            load_next(words, parts, loads, lengths, turn, cursor, t);
            let kept = kept_pairs(args, &of_head, &rows, plan, step, t.base);

            if comptime!(!t.score.biased()) {
                s = softcapped::<S>(s_next, numbers, t);
            }
            if masked != 0 {
                let lane = unit() % 32;
                let row = unit() / 32 * 16 + lane / 4;
                let (masks, quad) = (parts.masks, (lane % 4) * 2);
                s = mask::<S>(s, words, masks, first_entry, j, row, quad, t.base);
            }
            let stats_at = base
                + comptime!(t.stats_offset() as u32)
                + stage * comptime!(t.stats_bytes() as u32)
                + (unit() % 4) * 16;
            let mut p = weights_of::<S>(s, &of_rows, stats_at, blocks, numbers, weight_shape);
            if weights_count::<S>(&p, numbers, 1u32, comptime!(t.units() as u32), weight_shape) {
                if comptime!(t.score.threshold) {
                    dp_started = start::<S>(v_at, do_at, t);
                }
                let weights = pack_all::<S, P>(p, t.half);
                let mut left = weights;
                if comptime!(t.score.dropout) {
                    left = pack_all::<S, P>(drop_out::<S>(p, &kept, t.score), t.half);
                }
                // From here on, p is used for gradients of scores only. With the softcap's derivative multiplied in, no register has to keep the scores.
                if comptime!(!t.score.biased()) {
                    capped = s;
                }
                p = slope_weights::<S>(p, capped, numbers.softcap, t.score.softcap);
                let mut sloped = weights;
                if comptime!(t.score.softcap && t.packed()) {
                    sloped = pack_all::<S, P>(p, t.half);
                }
                // The same bytes are K-major for s and dp, and MN-major for dK, dV and dQ.
                let do_wide = descriptor(do_address + offset, comptime!(t.cols * ROW));
                let grad_v_started = accumulate::<P, O>(grad_v, left, do_wide, t.half, t.dim);
                let dp = wait::<S>(dp_started, 1usize, width);
                let turned = kept_again(&kept, t.base);
                let ds = gradients_of_scores::<S, P>(
                    dp,
                    &p,
                    &sloped,
                    &of_rows,
                    stats_at,
                    &turned,
                    args,
                    weight_shape,
                );
                let left = pack_all::<S, P>(ds, t.half);
                let other = (done & 1) * comptime!(t.ds_bytes() as u32);
                let ds_address = base + comptime!(t.ds_offset() as u32) + other;
                store_left::<P>(left, swizzled(ds_address), comptime!(t.rows() * ROW));
                let q_wide = descriptor(q_address + offset, comptime!(t.cols * ROW));
                let mut grad_k_started = grad_k;
                if comptime!(t.dk_first()) {
                    grad_k_started = accumulate::<P, O>(grad_k, left, q_wide, t.half, t.dim);
                }
                let visit = visit_of(chain, visit, row_of_scratch, t);
                async_fence();
                named_sync(1u32, comptime!(t.units() as u32));
                let group = uniform(unit() / 128);
                let dq_started = start_queries::<C>(ds_address, own_at, group, t);
                if comptime!(!t.dk_first()) {
                    grad_k_started = accumulate_shared::<O>(
                        grad_k,
                        descriptor(ds_address + group * comptime!((64 * ROW) as u32), 16usize),
                        q_wide,
                        t.half,
                        t.dim,
                        t.cols,
                        comptime!(t.rows() * ROW),
                    );
                }
                let s_started = start_next::<S>(
                    words, parts, lengths, loads, cursor, chain, own_at, turn, ticket, done,
                    before, t,
                );
                grad_v = wait::<O>(grad_v_started, 3usize, comptime!(t.dim / 2));
                if comptime!(t.dk_first()) {
                    grad_k = wait::<O>(grad_k_started, 2usize, comptime!(t.dim / 2));
                }
                // Products that may still be unfinished: s, and dK if it starts after dQ.
                let behind = comptime!(2 - usize::from(t.dk_first()));
                let dq_width = C::value();
                let dq = wait::<C>(dq_started, behind, dq_width);

                let lane = unit() % 32;
                let listing = &plan.listing;
                let scale = numbers.scale;
                add_queries::<C>(
                    grad_q, dq, base, chain, &visit, listing, lengths, scale, false, t,
                );

                if comptime!(!t.dk_first()) {
                    grad_k = wait::<O>(grad_k_started, 1usize, comptime!(t.dim / 2));
                }
                if lane == 0 {
                    barrier_arrive(base + comptime!(t.empty()) + stage * 8);
                }
                s_next = wait::<S>(s_started, 0usize, width);
            } else {
                // There is nothing to add, but the tile must take its turn.
                let visit = visit_of(chain, visit, row_of_scratch, t);
                let s_started = start_next::<S>(
                    words, parts, lengths, loads, cursor, chain, own_at, turn, ticket, done,
                    before, t,
                );
                let (none, scale) = (Vector::<f32, C>::zeroed(), numbers.scale);
                add_queries::<C>(
                    grad_q,
                    none,
                    base,
                    chain,
                    &visit,
                    &plan.listing,
                    lengths,
                    scale,
                    true,
                    t,
                );
                if unit() % 32 == 0 {
                    barrier_arrive(base + comptime!(t.empty()) + stage * 8);
                }
                s_next = wait::<S>(s_started, 0usize, width);
            }
            chain.done.store(done + 1);
        }
    }

    if comptime!(t.persistent) {
        if unit() == 0 && chain.done.read() == before {
            cache_tile(words, parts, lengths, base, ticket, turn, t);
        }
        // All warps have read the tile's keys and values. Those of the tile after the next one overwrite them.
        named_sync(1u32, comptime!(t.units() as u32));
        let after_next = cached_tile(base, turn, t);
        if after_next.rank != NONE {
            load_tile(words, loads, &after_next, turn, t);
        }
    }
    // Recomputed, because registers are short.
    let own = current_tile(words, parts, lengths, own, t);
    let factor = factor_of(args, t.score);
    store_keys::<O>(
        out,
        &grad_k,
        &grad_v,
        &own,
        plan,
        lengths,
        numbers.scale,
        factor,
        t,
    );
    s_next
}

/// Returns the products of a tile's first step: `s`, if the previous tile has started them.
#[cube]
fn first_products<S: Size>(
    s: Vector<f32, S>,
    own_at: u32,
    q_address: u32,
    base: u32,
    cursor: &Cursor,
    chain: &Chain,
    #[comptime] t: BackwardTile,
) -> Vector<f32, S> {
    let mut s_next = s;
    if chain.started.read() == 0 {
        let stage = chain.done.read() % comptime!(t.stages as u32);
        if cursor.loaded.read() > chain.done.read() {
            let parity = (chain.done.read() / comptime!(t.stages as u32)) & 1;
            barrier_wait(base + comptime!(t.full()) + stage * 8, parity);
        }
        let s_started = start::<S>(own_at, q_address + stage * comptime!(t.b_bytes() as u32), t);
        s_next = wait::<S>(s_started, 0usize, S::value());
    }
    s_next
}

/// Starts the products of the next step, after all others of this step, and closes the visit of the previous step. All warps must call it together.
#[cube]
fn start_next<S: Size>(
    words: &[u32],
    parts: &PlanParts,
    lengths: &Lengths,
    loads: &Loads,
    cursor: &Cursor,
    chain: &Chain,
    own_at: u32,
    turn: u32,
    ticket: u32,
    done: u32,
    before: u32,
    #[comptime] t: BackwardTile,
) -> Vector<f32, S> {
    let base = loads.base;
    let its_own = wait_for_next(own_at, turn, loads, cursor, chain, t);
    let next_stage = (done + 1) % comptime!(t.stages as u32);
    // After the last step the operands are arbitrary, and the result is unused.
    let s_started = start::<S>(
        its_own,
        base + comptime!(t.q_offset() as u32) + next_stage * comptime!(t.b_bytes() as u32),
        t,
    );
    if comptime!(t.persistent) {
        if unit() == 0 && done == before {
            cache_tile(words, parts, lengths, base, ticket, turn, t);
        }
    }
    if comptime!(!t.unfenced) {
        // All products of the step are started, so the fence does not delay them.
        if unit() % 32 < comptime!(t.counters() as u32) {
            close(chain, t);
        }
    }
    s_started
}

/// Starts `dsᵀ · k` over all keys of the tile. A warpgroup's `group` determines its columns, or its queries.
#[cube]
fn start_queries<C: Size>(
    ds_address: u32,
    own_at: u32,
    group: u32,
    #[comptime] t: BackwardTile,
) -> Vector<f32, C> {
    let ds_wide = descriptor(
        ds_address + group * comptime!(t.dq_left_offset() as u32),
        comptime!(t.rows() * ROW),
    );
    let k_wide = descriptor(
        own_at + group * comptime!(t.dq_right_offset() as u32),
        comptime!(t.rows() * ROW),
    );
    wide_product::<C>(ds_wide, k_wide, t.half, comptime!(t.rows()))
}

/// Waits for the next step, if there is one, and returns the address of its tile's keys.
#[cube]
fn wait_for_next(
    own_at: u32,
    turn: u32,
    loads: &Loads,
    cursor: &Cursor,
    chain: &Chain,
    #[comptime] t: BackwardTile,
) -> u32 {
    let next = chain.done.read() + 1;
    let mut its_own = own_at;
    if cursor.loaded.read() > next {
        let stage = next % comptime!(t.stages as u32);
        let parity = (next / comptime!(t.stages as u32)) & 1;
        barrier_wait(loads.base + comptime!(t.full()) + stage * 8, parity);
        if comptime!(t.persistent) {
            if cursor.ahead.read() != 0 {
                its_own = own_address(loads.base, turn + 1, t);
                wait_for_own(loads.base, turn + 1, t);
            }
        }
        chain.started.store(1u32);
    } else {
        chain.started.store(0u32);
    }
    its_own
}

/// Stores dK and dV of the unit's two rows of a tile, or its share of their sums.
#[cube]
fn store_keys<O: Size>(
    out: &mut [Vector<u32, Four>],
    grad_k: &Vector<f32, O>,
    grad_v: &Vector<f32, O>,
    own: &OwnTile,
    plan: &PlanWords,
    lengths: &Lengths,
    scale: f32,
    factor: f32,
    #[comptime] t: BackwardTile,
) {
    let words = &plan.words[..];
    let lane = unit() % 32;
    let row = unit() / 32 * 16 + lane / 4;
    let first = (own.batch * lengths.kv_heads + own.kv_head) * lengths.seq_kv;
    let places = own_places(words, own.rows, row, comptime!(t.own_shape()));
    let rows = StoredRows {
        place: places.upper,
        place8: places.lower,
        listing: Listing {
            stride: plan.listing.stride,
            class_len: plan.listing.class_len,
        },
        len: lengths.seq_kv,
        lane,
    };
    let mut of_k = first;
    let mut of_v = first;
    if comptime!(t.shares > 1) {
        let rows = lengths.batch * lengths.kv_heads * lengths.seq_kv;
        of_k += own.share * 2 * rows;
        of_v = of_k + rows;
    }
    store_gradient::<O>(out, grad_k, 0u32, of_k, &rows, scale, t);
    store_gradient::<O>(out, grad_v, lengths.second, of_v, &rows, factor, t);
}

/// Returns the products, softcapped if the call has a softcap.
#[cube]
fn softcapped<S: Size>(
    s_in: Vector<f32, S>,
    numbers: &ScoreScalars,
    #[comptime] t: BackwardTile,
) -> Vector<f32, S> {
    let mut s = s_in;
    cap::<S>(&mut s, numbers.softcap, numbers.cap_scale, t.score.softcap);
    s
}

/// Starts the product of a warpgroup's own 64 rows and a step's rows.
#[cube]
fn start<S: Size>(own: u32, step: u32, #[comptime] t: BackwardTile) -> Vector<f32, S> {
    let group = uniform(unit() / 128);
    product::<S>(
        descriptor(own + group * comptime!((64 * ROW) as u32), 16usize),
        descriptor(step, 16usize),
        comptime!(t.scores(t.dim)),
    )
}

/// Returns the address of the unit's first pair of ds. Rows 8 apart have the same swizzle.
#[cube]
fn swizzled(address: u32) -> u32 {
    let unit = unit();
    let lane = unit % 32;
    address + (unit / 32 * 16 + lane / 4) * comptime!(ROW as u32) + lane / 4 * 16 + lane % 4 * 4
}
