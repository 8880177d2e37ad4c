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
//! The scratch has the layout of wgmma's results: for each 16 queries, for each part of the columns, for each 8 of the queries, for each 16
//! columns, the four numbers of each lane.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use super::BackwardTile;
use super::asm::*;
use super::forward::{own_place, own_rows, pack_all};
use super::gradient::*;
use crate::kernels::simt::forward::LOW;
use crate::kernels::simt::tile::{Listing, PlanParts, Strides, position_of};
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
    /// Pairs of elements before dV.
    pub second: u32,
}

/// The tile of keys that a cube has.
#[derive(CubeType, Clone, Copy)]
struct Own {
    /// Its index, by falling work.
    rank: u32,
    kv_head: u32,
    batch: u32,
}

/// Heads take turns: tiles of one head wait for each other, so few of them should run side by side; but those that do share
/// what they read in the cache.
#[cube]
fn own(lengths: &Lengths) -> Own {
    let chunk = CUBE_POS_X / (lengths.tiles * lengths.spread);
    let within = CUBE_POS_X % (lengths.tiles * lengths.spread);
    let first = chunk * lengths.spread;
    let turns = lengths.spread.min(lengths.kv_heads * lengths.batch - first);
    let outer = first + within % turns;
    Own {
        rank: within / turns,
        kv_head: outer % lengths.kv_heads,
        batch: outer / lengths.kv_heads,
    }
}

/// `k`, `v`, `q`, `grad_out` as maps `[batch, heads, seq, dim]`, with `residue` `[batch, heads, stride, seq / stride, dim]`;
/// `stats` a map `[batch · heads, pitch, 2]` of `lse · log2 e` and delta of the query at each place; `scratch` as above,
/// `counters` one for each 16 queries (8 where a group has no more) and each half of the columns; `out`
/// `[batch, kv_heads, seq_kv, dim]` in pairs of elements, dV from pair `second` on. With `carry` dK and dV are added to it.
#[cube(launch_unchecked)]
pub fn backward<S: Size, P: Size, O: Size, C: Size>(
    k: &TensorMap<u32, Tiled>,
    v: &TensorMap<u32, Tiled>,
    q: &TensorMap<u32, Tiled>,
    grad_out: &TensorMap<u32, Tiled>,
    stats: &TensorMap<f32, Tiled>,
    scratch: &mut [f32],
    counters: &mut [u32],
    out: &mut [u32],
    plan: &[u32],
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
    let own = own(&lengths);
    let batch = own.batch;

    if UNIT_POS_X == 0 {
        barrier_init(base + comptime!(t.own()), 1u32);
        #[unroll]
        for i in 0..comptime!(t.stages) {
            let offset = comptime!(8 * i as u32);
            barrier_init(base + comptime!(t.full()) + offset, 1u32);
            barrier_init(base + comptime!(t.empty()) + offset, comptime!(t.warps()));
        }
        barrier_fence();
    }
    sync_cube();

    // A tile of keys goes through all query heads of its group.
    let first_head = own.kv_head * lengths.heads_per_kv;
    let heads = lengths.kv_heads * lengths.heads_per_kv;
    let heads_at = parts.heads + batch as usize * parts.batch;
    let record0 = plan[heads_at + first_head as usize] as usize;
    let tile = plan[parts.order + record0 + own.rank as usize];
    let rows = own_rows(
        &parts,
        record0,
        tile,
        comptime!(t.rows()),
        comptime!(t.group),
        comptime!(t.clustered),
    );
    let class_len = listing.class_len as u32;

    if UNIT_POS_X == 0 {
        barrier_expect(base + comptime!(t.own()), comptime!(2 * t.a_bytes()));
    }
    if lane == 0 {
        // Dealt to the warps: lanes of one warp would wait for each other.
        let mut index = warp;
        while index < comptime!(2 * t.a_boxes() as u32) {
            let mut map = tensor_map_address(k);
            if index >= comptime!(t.a_boxes() as u32) {
                map = tensor_map_address(v);
            }
            load_own(
                map,
                plan,
                base,
                rows,
                index,
                class_len,
                own.kv_head,
                batch,
                t,
            );
            index += comptime!(t.warps());
        }
    }

    let loads = Loads {
        q: tensor_map_address(q),
        grad_out: tensor_map_address(grad_out),
        stats: tensor_map_address(stats),
        base,
        class_len,
        batch,
        heads,
    };
    // The next step to load.
    let cursor = Cursor {
        head: RuntimeCell::<u32>::new(first_head),
        end: first_head + lengths.heads_per_kv,
        entry: RuntimeCell::<usize>::new(0usize),
        j: RuntimeCell::<u32>::new(0u32),
        steps: RuntimeCell::<u32>::new(0u32),
        loaded: RuntimeCell::<u32>::new(0u32),
    };
    open(plan, &parts, heads_at, tile, &cursor);
    #[unroll]
    for _ in 0..comptime!(t.stages - t.lag) {
        load_next(plan, &parts, &loads, heads_at, tile, &cursor, t);
    }

    let q_address = base + comptime!(t.q_offset() as u32);
    let do_address = base + comptime!(t.do_offset() as u32);

    // A lane adds all 16 queries of the warp, or, with groups of 8, each of two lanes 8.
    let chain = Chain {
        counters: global_address::<u32>(unsafe { counters.as_ptr_unchecked() }),
        scratch: global_address::<f32>(unsafe { scratch.as_ptr_unchecked() }),
        part: warp / 4 % comptime!(t.parts() as u32),
        query: warp % 4 * 16 + warp / 4 * comptime!(t.dq_query_offset() as u32) + lane % 2 * 8,
    };
    // The counter to be raised when the additions are done, and to what.
    let mut open_counter = 0u32;
    let mut open_visits = 0u32;

    let width = S::value();
    let mut grad_k = Vector::<f32, O>::zeroed();
    let mut grad_v = Vector::<f32, O>::zeroed();
    let mut done = 0u32;
    barrier_wait(base + comptime!(t.own()), 0u32);
    if cursor.loaded.read() > 0 {
        barrier_wait(base + comptime!(t.full()), 0u32);
    }
    let s_started = start::<S>(base + comptime!(t.k_offset() as u32), q_address, t);
    let mut s_next = wait::<S>(s_started, 0usize, width);
    for turn in 0..lengths.heads_per_kv {
        let head = first_head + turn;
        let record = parts.tiles + (plan[heads_at + head as usize] as usize + tile as usize) * 3;
        let first_entry = parts.entries + plan[record] as usize * 3;
        let steps = uniform(plan[record + 1]);
        let first_query = (batch * heads + head) * lengths.pitch;
        for j in 0..steps {
            let stage = done % comptime!(t.stages as u32);
            let offset = stage * comptime!(t.b_bytes() as u32);
            let dp_started = start::<S>(
                base + comptime!(t.v_offset() as u32),
                do_address + offset,
                t,
            );
            // Which queries the unit adds dQ to, should it be one of the two.
            let step = first_entry + (j * comptime!(t.entries() as u32 * 3)) as usize;
            let word = step + (chain.query / comptime!(t.group as u32) * 3) as usize;
            let masked = plan[step + 2] & MASKED_STEP;
            let visit = plan[word + 2] & NO_VISIT;
            let row_of_scratch = first_query
                + plan[word] * comptime!(t.group as u32)
                + chain.query % comptime!(t.group as u32);
            load_next(plan, &parts, &loads, heads_at, tile, &cursor, t);

            let mut s = s_next;
            if comptime!(t.softcap) {
                #[unroll]
                for i in 0..S::value() {
                    // tanh x = 1 − 2 / (1 + exp 2x); PTX's tanh has but eleven bits.
                    let e = exp2(s.extract(i) * cap_scale);
                    s.insert(
                        i,
                        multiply_add(-2.0f32 * softcap, reciprocal(1.0f32 + e), softcap),
                    );
                }
            }
            let capped = s;
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
                    p.insert(at, exp2(multiply_add(s.extract(at), log2_scale, -lse)));
                }
            }
            let left = pack_all::<S, P>(p, t.half);
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
                            left.extract(comptime!(at / 2)),
                            comptime!(at % 2 == 1),
                            t.half,
                        );
                    }
                    ds.insert(at, weight * (ds.extract(at) - delta));
                }
            }
            if comptime!(t.softcap) {
                #[unroll]
                for i in 0..S::value() {
                    let ratio = capped.extract(i) / softcap;
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
                base + comptime!(t.k_offset() as u32)
                    + group * comptime!(t.dq_right_offset() as u32),
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
            let next = (done + 1) % comptime!(t.stages as u32);
            if cursor.loaded.read() > done + 1 {
                let parity = ((done + 1) / comptime!(t.stages as u32)) & 1;
                barrier_wait(base + comptime!(t.full()) + next * 8, parity);
            }
            // After the last step of whatever is there, for nobody.
            let s_started = start::<S>(
                base + comptime!(t.k_offset() as u32),
                q_address + next * comptime!(t.b_bytes() as u32),
                t,
            );
            grad_v = wait::<O>(grad_v_started, 3usize, comptime!(t.dim / 2));
            let dq_width = C::value();
            let dq = wait::<C>(dq_started, 2usize, dq_width);

            // What the warp added a step ago is in memory: its tile's turn is over there, and the buffer is free.
            let lane = unit() % 32;
            if lane < comptime!(t.counters() as u32) {
                bulk_wait();
                if open_visits != 0 {
                    post(
                        chain.counters + u64::cast_from(open_counter) * 4,
                        open_visits,
                    );
                }
            }
            sync_warp();
            open_counter = counter;
            open_visits = select(visit == NO_VISIT, 0u32, visit + 1);
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
            done += 1;
        }
    }
    let lane = unit() % 32;
    let row = unit() / 32 * 16 + lane / 4;
    let first = (batch * lengths.kv_heads + own.kv_head) * lengths.seq_kv;
    let place = place_of(plan, rows, row, t);
    let place8 = place_of(plan, rows, row + 8, t);
    let one = f32::new(1.0);
    let len = lengths.seq_kv;
    store_rows::<O>(
        out,
        &grad_k,
        0u32,
        first,
        place,
        place8,
        &listing,
        len,
        lane,
        scale,
        comptime!(t.store()),
    );
    store_rows::<O>(
        out,
        &grad_v,
        lengths.second,
        first,
        place,
        place8,
        &listing,
        len,
        lane,
        one,
        comptime!(t.store()),
    );

    if lane < comptime!(t.counters() as u32) {
        bulk_wait();
        if open_visits != 0 {
            post(
                chain.counters + u64::cast_from(open_counter) * 4,
                open_visits,
            );
        }
    }
}

/// Where a warp adds its dQ.
#[derive(CubeType, Clone, Copy)]
struct Chain {
    counters: u64,
    scratch: u64,
    /// Which half of the columns.
    part: u32,
    /// The first of the unit's eight queries of a step.
    query: u32,
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
    base: u32,
    rows: u32,
    index: u32,
    class_len: u32,
    head: u32,
    batch: u32,
    #[comptime] t: BackwardTile,
) {
    let boxes = comptime!(t.a_boxes() as u32);
    let mut start = base + comptime!(t.k_offset() as u32);
    if index >= boxes {
        start = base + comptime!(t.v_offset() as u32);
    }
    let which = index % boxes;
    let span = which % comptime!(t.spans() as u32);
    let row = which / comptime!(t.spans() as u32) * comptime!(t.a_group() as u32);
    let target = start + span * comptime!((t.rows() * ROW) as u32) + row * comptime!(ROW as u32);
    let place = place_of(plan, rows, row, t);
    let bar = base + comptime!(t.own());
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
    q: u64,
    grad_out: u64,
    stats: u64,
    base: u32,
    class_len: u32,
    batch: u32,
    /// Query heads.
    heads: u32,
}

/// The step that is loaded next.
#[derive(CubeType)]
struct Cursor {
    head: RuntimeCell<u32>,
    /// The head after the last one.
    end: u32,
    /// Word of the head's first entry.
    entry: RuntimeCell<usize>,
    j: RuntimeCell<u32>,
    /// Steps of the head.
    steps: RuntimeCell<u32>,
    /// Steps loaded so far, of all heads.
    loaded: RuntimeCell<u32>,
}

/// Reads the record of the cursor's head.
#[cube]
fn open(plan: &[u32], parts: &PlanParts, heads_at: usize, tile: u32, cursor: &Cursor) {
    let head = cursor.head.read() as usize;
    let record = parts.tiles + (plan[heads_at + head] as usize + tile as usize) * 3;
    cursor
        .entry
        .store(parts.entries + plan[record] as usize * 3);
    cursor.j.store(0u32);
    cursor.steps.store(uniform(plan[record + 1]));
}

/// Loads the cursor's step, if there is one, once its buffer is free. All units call this together.
#[cube]
fn load_next(
    plan: &[u32],
    parts: &PlanParts,
    loads: &Loads,
    heads_at: usize,
    tile: u32,
    cursor: &Cursor,
    #[comptime] t: BackwardTile,
) {
    while cursor.j.read() >= cursor.steps.read() && cursor.head.read() + 1 < cursor.end {
        cursor.head.store(cursor.head.read() + 1);
        open(plan, parts, heads_at, tile, cursor);
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
                    loads.batch * loads.heads + cursor.head.read(),
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
                    loads.batch,
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
        let part = row % comptime!(t.counted() as u32);
        if part < comptime!(t.parts() as u32) {
            let counter = row / comptime!(t.counted() as u32) * comptime!(t.parts() as u32) + part;
            counters[counter as usize] = 0u32;
        }
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
