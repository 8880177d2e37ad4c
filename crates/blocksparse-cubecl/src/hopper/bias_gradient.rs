//! The gradient of a bias tensor, pair by pair. A cube has a tile of pairs, which is one step of a tile of queries. It keeps the sums of the pairs'
//! gradients in registers, and loops over all batch entries and heads that share the bias: the *members*.
//!
//! ```text
//! s  = q · kᵀ      p  = exp2(s · log2_scale − lse)        member after member
//! dp = dO · vᵀ     sums += p ∘ (dp − delta)
//!
//! start:           copy the bias of each unit's pairs to shared memory, since all members have the same
//! all warps  TMA:  q and k, then dO and v, of the member after the next one
//! every warpgroup, per member:
//!     s, dp        wgmma, both started
//!     s done:      free the stage of its operands; compute p in registers, while dp is computed
//!     dp done:     add to the sums
//! ```
//!
//! The operands of one product are a stage. All members have the same queries and keys, so the loads differ in head and batch entry only. Every element of
//! the gradient has one writer, which sums in the order of batch entries and heads. Heads with other patterns than the launch's are skipped: each pattern
//! has a launch, and later launches add to the present values.

// Compile-time conditions stay separate from run-time ones, and kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::bias_kept::{add_kept_bias, keep_bias};
use super::bias_store::{PairPlace, store_pairs};
use super::dropout::{drop_gradient, kept_again, kept_pairs};
use super::gradient::mask;
use super::options::*;
use super::pair_tile::PairTile;
use super::rows::own_places;
use crate::arch::sm90::*;
use crate::shared::addressing::{PlanParts, Schedule, batch_of, head_of};
use crate::shared::own_rows::{own_place, own_rows};
use crate::shared::score::ScoreScalars;

/// Marks no pattern, or no tile.
pub const NONE: u32 = u32::MAX;

/// Numbers of members, and lengths of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sharing {
    /// Batch entries that share an element of the gradient.
    pub batches: u32,
    /// Heads that share an element of the gradient.
    pub heads: u32,
    /// Number of heads of the call.
    pub all_heads: u32,
    /// Query heads per head of keys.
    pub heads_per_kv: u32,
    /// Places per head in the stats.
    pub pitch: u32,
    /// Tiles per head.
    pub tiles: u32,
    /// First tile record of the launch's pattern, or [`NONE`] for that of the cube's own head.
    pub pattern: u32,
}

/// The members of a cube.
#[derive(CubeType, Clone, Copy)]
struct Members {
    first_batch: u32,
    end_batch: u32,
    first_head: u32,
    end_head: u32,
    /// The first head's head of keys, and its index among the query heads of that one.
    first_key: u32,
    first_of_key: u32,
    heads_per_kv: u32,
    /// First tile record of their pattern.
    record: u32,
}

/// One of the members. At the end, its batch entry is past the last one.
#[derive(CubeType)]
struct Member {
    batch: RuntimeCell<u32>,
    head: RuntimeCell<u32>,
    /// Its head of keys, and its index among the query heads of that one.
    key: RuntimeCell<u32>,
    of_key: RuntimeCell<u32>,
}

#[cube]
fn first_member(
    plan: &[u32],
    parts: &PlanParts,
    members: &Members,
    #[comptime] several: bool,
) -> Member {
    let member = Member {
        batch: RuntimeCell::<u32>::new(members.first_batch),
        head: RuntimeCell::<u32>::new(members.first_head),
        key: RuntimeCell::<u32>::new(members.first_key),
        of_key: RuntimeCell::<u32>::new(members.first_of_key),
    };
    skip_others(plan, parts, members, &member, several);
    member
}

#[cube]
fn step(members: &Members, member: &Member) {
    member.head.store(member.head.read() + 1);
    member.of_key.store(member.of_key.read() + 1);
    if member.of_key.read() == members.heads_per_kv {
        member.of_key.store(0u32);
        member.key.store(member.key.read() + 1);
    }
    if member.head.read() == members.end_head {
        member.head.store(members.first_head);
        member.key.store(members.first_key);
        member.of_key.store(members.first_of_key);
        member.batch.store(member.batch.read() + 1);
    }
}

/// Advances to the next member with the launch's pattern, or to the end. Unless there are `several` patterns, all members have it.
#[cube]
fn skip_others(
    plan: &[u32],
    parts: &PlanParts,
    members: &Members,
    member: &Member,
    #[comptime] several: bool,
) {
    if comptime!(several) {
        while is_other(plan, parts, members, member) {
            step(members, member);
        }
    }
}

/// Whether the member exists and has another pattern.
#[cube]
fn is_other(plan: &[u32], parts: &PlanParts, members: &Members, member: &Member) -> bool {
    let mut other = false.runtime();
    if member.batch.read() < members.end_batch {
        let at = parts.heads + member.batch.read() as usize * parts.batch;
        other = uniform(plan[at + member.head.read() as usize]) != members.record;
    }
    other
}

/// `q`, `k`, `v` and `grad_out` are tensor maps `[batch, heads, seq, dim]`, or with `residue` `[batch, heads, stride, seq / stride, dim]`. `stats` is
/// `[batch · heads, pitch, 2]`: `lse · log2 e` and delta of the query at each place. `gradient` has the bias's shape. The grid is
/// `[steps of the pattern, heads of the bias, its batch entries]`.
#[cube(launch_unchecked)]
pub fn bias_gradient<S: Size, P: Size>(
    q: &TensorMap<u32, Tiled>,
    k: &TensorMap<u32, Tiled>,
    v: &TensorMap<u32, Tiled>,
    grad_out: &TensorMap<u32, Tiled>,
    stats: &[f32],
    gradient: &mut [f32],
    schedule: Schedule,
    args: ComptimeOption<PairArgs>,
    sharing: Sharing,
    numbers: ScoreScalars,
    #[comptime] t: PairTile,
) {
    let parts = &schedule.parts;
    let plan = &schedule.plan.words[..];
    let listing = &schedule.plan.listing;
    let slice = &schedule.slice;
    let log2_scale = numbers.log2_scale;
    let softcap = numbers.softcap;
    let cap_scale = numbers.cap_scale;
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;

    let first_head = head_of(slice) as u32;
    let first_batch = batch_of(slice) as u32;
    let mut record = sharing.pattern;
    if record == NONE {
        record = plan[parts.heads + first_batch as usize * parts.batch + first_head as usize];
    }
    let members = Members {
        first_batch,
        end_batch: first_batch + sharing.batches,
        first_head,
        end_head: first_head + sharing.heads,
        first_key: first_head / sharing.heads_per_kv,
        first_of_key: first_head % sharing.heads_per_kv,
        heads_per_kv: sharing.heads_per_kv,
        record,
    };

    if UNIT_POS_X == 0 {
        let full = base + comptime!(t.full());
        ring_init(
            full,
            base + comptime!(t.empty()),
            t.stages,
            comptime!(t.warps()),
        );
        shared_store(base, NONE);
    }
    sync_cube();
    // The steps of a pattern's tiles are consecutive. All units search for the tile that has the cube's step.
    let records = parts.tiles + record as usize * 3;
    let per_step = comptime!(t.entries() as u32);
    let step_entry = plan[records] + CUBE_POS_X * per_step;
    let mut candidate = UNIT_POS_X;
    while candidate < sharing.tiles {
        let at = records + candidate as usize * 3;
        let first = plan[at];
        if step_entry >= first {
            if step_entry < first + plan[at + 1] * per_step {
                shared_store(base, candidate);
            }
        }
        candidate += comptime!(t.units() as u32);
    }
    sync_cube();
    let tile = uniform(shared_load(base));
    let member = first_member(plan, parts, &members, t.several);

    if tile != NONE && member.batch.read() < members.end_batch {
        let tile_record = records + tile as usize * 3;
        let j = uniform((step_entry - plan[tile_record]) / per_step);
        let masked = j < uniform(plan[tile_record + 2]);
        let its_entry = parts.entries + step_entry as usize * 2;
        let tile_entry = parts.entries + plan[tile_record] as usize * 2;
        let rows_at = own_rows(parts, record as usize, tile, comptime!(t.own_shape()));
        let row = warp * 16 + lane / 4;
        let places = own_places(plan, rows_at, row, comptime!(t.own_shape()));
        let rows = unit_rows(places.upper, places.lower, listing, t.base);

        let index = warp + lane * comptime!(t.warps());
        let own = box_of(plan, rows_at, its_entry, index, t);
        let loads = Loads {
            q: tensor_map_address(q),
            k: tensor_map_address(k),
            v: tensor_map_address(v),
            grad_out: tensor_map_address(grad_out),
            base,
            class_len: listing.class_len as u32,
        };
        let cursor = Cursor {
            member: first_member(plan, parts, &members, t.several),
            second: RuntimeCell::<u32>::new(0u32),
            loaded: RuntimeCell::<u32>::new(0u32),
        };
        #[unroll]
        for _ in 0..comptime!(t.stages - t.lag) {
            load_next(plan, parts, &members, &loads, &own, &cursor, t);
        }

        let group_rows = warp / 4 * comptime!((64 * ROW) as u32);
        let stages = base + comptime!(t.stages_offset() as u32);
        let a_desc = descriptor(stages + group_rows, 16usize);
        let b_desc = descriptor(stages + comptime!(t.a_bytes() as u32), 16usize);
        let width = S::value();

        // The bias is the same for all members.
        let own_bias = base
            + comptime!(t.bias_offset() as u32)
            + warp / 4 * comptime!(t.bias_bytes() as u32)
            + unit() % 128 * 16;
        let to = PairPlace {
            batch: first_batch,
            head: first_head,
            entry: its_entry,
        };
        keep_bias::<S, P>(own_bias, &args, &to, &rows, &schedule.plan, t);

        let mut sums = Vector::<f32, S>::zeroed();
        let mut done = 0u32;
        let upper = stats_of(stats, &members, &sharing, &member, places.upper);
        let lower = stats_of(stats, &members, &sharing, &member, places.lower);
        let mut lse0 = upper.lse;
        let mut delta0 = upper.delta;
        let mut lse1 = lower.lse;
        let mut delta1 = lower.delta;
        while member.batch.read() < members.end_batch {
            let batch = member.batch.read();
            let of_head = options_of(&args, batch, member.head.read(), t.base);
            let first = done % comptime!(t.stages as u32);
            let s_started = start::<S>(base, a_desc, b_desc, done, t);
            let second = (done + 1) % comptime!(t.stages as u32);
            let dp_started = start::<S>(base, a_desc, b_desc, done + 1, t);
            load_next(plan, parts, &members, &loads, &own, &cursor, t);
            // These loads are in flight while this member is computed.
            step(&members, &member);
            skip_others(plan, parts, &members, &member, t.several);
            let next_upper = stats_of(stats, &members, &sharing, &member, places.upper);
            let next_lower = stats_of(stats, &members, &sharing, &member, places.lower);
            let kept = kept_pairs(&args, &of_head, &rows, &schedule.plan, its_entry, t.base);
            let turned = kept_again(&kept, t.base);
            let mut s = wait::<S>(s_started, 1usize, width);
            if lane == 0 {
                barrier_arrive(base + comptime!(t.empty()) + first * 8);
            }
            cap::<S>(&mut s, softcap, cap_scale, t.score.softcap);
            s = add_biases::<S>(
                s,
                cap_scale,
                &args,
                &of_head,
                &rows,
                &schedule.plan,
                its_entry,
                comptime!(t.other_biases()),
            );
            s = add_kept_bias::<S>(s, own_bias, cap_scale, t);
            if masked {
                let quad = (lane % 4) * 2;
                s = mask::<S>(s, plan, parts.masks, tile_entry, j, row, quad, t.base);
            }
            let mut p = Vector::<f32, S>::zeroed();
            #[unroll]
            for i in 0..S::value() {
                let mut lse = lse0;
                if comptime!(i % 4 >= 2) {
                    lse = lse1;
                }
                p.insert(i, exp2(multiply_add(s.extract(i), log2_scale, -lse)));
            }
            load_next(plan, parts, &members, &loads, &own, &cursor, t);
            let dp = wait::<S>(dp_started, 0usize, width);
            if lane == 0 {
                barrier_arrive(base + comptime!(t.empty()) + second * 8);
            }
            #[unroll]
            for i in 0..S::value() {
                let mut delta = delta0;
                if comptime!(i % 4 >= 2) {
                    delta = delta1;
                }
                let inner = drop_gradient(dp.extract(i), delta, &turned, &args, i, t.score);
                sums.insert(i, multiply_add(p.extract(i), inner, sums.extract(i)));
            }
            lse0 = next_upper.lse;
            delta0 = next_upper.delta;
            lse1 = next_lower.lse;
            delta1 = next_lower.delta;
            done += 2;
        }
        store_pairs::<S>(gradient, &sums, &args, &to, &rows, &schedule.plan, t);
    }
}

/// `lse · log2 e` and delta of a query.
#[derive(CubeType, Clone, Copy)]
struct QueryStats {
    lse: f32,
    delta: f32,
}

#[cube]
fn stats_of(
    stats: &[f32],
    members: &Members,
    sharing: &Sharing,
    member: &Member,
    place: u32,
) -> QueryStats {
    let mut lse = f32::new(0.0);
    let mut delta = f32::new(0.0);
    if member.batch.read() < members.end_batch && place < sharing.pitch {
        let head = member.batch.read() * sharing.all_heads + member.head.read();
        let at = (head * sharing.pitch + place) as usize * 2;
        lse = stats[at];
        delta = stats[at + 1];
    }
    QueryStats { lse, delta }
}

/// Starts product `done`, whose operands are in its stage.
#[cube]
fn start<S: Size>(
    base: u32,
    a_desc: u64,
    b_desc: u64,
    done: u32,
    #[comptime] t: PairTile,
) -> Vector<f32, S> {
    let stage = done % comptime!(t.stages as u32);
    let parity = (done / comptime!(t.stages as u32)) & 1;
    let offset = u64::cast_from(stage * comptime!((t.stage_bytes() >> 4) as u32));
    barrier_wait(base + comptime!(t.full()) + stage * 8, parity);
    product::<S>(a_desc + offset, b_desc + offset, comptime!(t.scores(t.dim)))
}

/// Sources and targets of loads.
#[derive(CubeType, Clone, Copy)]
struct Loads {
    q: u64,
    k: u64,
    v: u64,
    grad_out: u64,
    base: u32,
    class_len: u32,
}

/// The unit's box of each product.
#[derive(CubeType, Clone, Copy)]
struct OwnBox {
    /// Index of the box. None if it exceeds the number of boxes.
    index: u32,
    /// Offset of the target in the stage.
    offset: u32,
    span: u32,
    place: u32,
}

#[cube]
fn box_of(
    plan: &[u32],
    rows_at: u32,
    its_entry: usize,
    index: u32,
    #[comptime] t: PairTile,
) -> OwnBox {
    let a_boxes = comptime!(t.a_boxes() as u32);
    let spans = comptime!(t.spans() as u32);
    let mut offset = 0u32;
    let mut place = 0u32;
    let span = index % spans;
    if index < a_boxes {
        let row = index / spans * comptime!(t.a_group() as u32);
        offset = span * comptime!((t.rows() * ROW) as u32) + row * comptime!(ROW as u32);
        place = own_place(plan, rows_at, row, comptime!(t.own_shape()));
    } else if index < comptime!(t.boxes() as u32) {
        // Each side has whole spans.
        let which = (index - a_boxes) / spans;
        offset = comptime!(t.a_bytes() as u32)
            + span * comptime!((t.cols * ROW) as u32)
            + which * comptime!((t.group * ROW) as u32);
        place = plan[its_entry + which as usize * 2] * comptime!(t.group as u32);
    }
    OwnBox {
        index,
        offset,
        span,
        place,
    }
}

/// The product whose operands are loaded next.
#[derive(CubeType)]
struct Cursor {
    member: Member,
    /// Whether it is dp.
    second: RuntimeCell<u32>,
    /// Products loaded so far.
    loaded: RuntimeCell<u32>,
}

/// Loads the cursor's operands, if there are any, once their stage is free. All units must call it together.
#[cube]
fn load_next(
    plan: &[u32],
    parts: &PlanParts,
    members: &Members,
    loads: &Loads,
    own: &OwnBox,
    cursor: &Cursor,
    #[comptime] t: PairTile,
) {
    let member = &cursor.member;
    if member.batch.read() < members.end_batch {
        let loaded = cursor.loaded.read();
        let stage = loaded % comptime!(t.stages as u32);
        let parity = (loaded / comptime!(t.stages as u32)) & 1;
        let full = loads.base + comptime!(t.full()) + stage * 8;
        let is_second = cursor.second.read() != 0;
        if own.index < comptime!(t.boxes() as u32) {
            barrier_wait(loads.base + comptime!(t.empty()) + stage * 8, 1 - parity);
            if own.index == 0 {
                barrier_expect(full, comptime!(t.stage_bytes()));
            }
            let mut map = select(is_second, loads.grad_out, loads.q);
            let mut head = member.head.read();
            if own.index >= comptime!(t.a_boxes() as u32) {
                map = select(is_second, loads.v, loads.k);
                head = member.key.read();
            }
            let target = loads.base
                + comptime!(t.stages_offset() as u32)
                + stage * comptime!(t.stage_bytes() as u32)
                + own.offset;
            load_at(
                map,
                target,
                full,
                own.span,
                own.place,
                loads.class_len,
                head,
                member.batch.read(),
                t.residue,
            );
        }
        if is_second {
            step(members, member);
            skip_others(plan, parts, members, member, t.several);
        }
        cursor.second.store(1 - cursor.second.read());
        cursor.loaded.store(loaded + 1);
    }
}
