//! The tiles of a cube in the fused backward kernel, and their loads.

// Compile-time conditions stay separate from run-time ones, and kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::rows::load_own;
use super::tiles::BackwardTile;
use crate::arch::sm90::*;
use crate::shared::addressing::PlanParts;
use crate::shared::own_rows::own_rows;

/// Lengths of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Lengths {
    /// Tiles per head.
    pub tiles: u32,
    /// Heads of keys (of all batch entries, times shares) that alternate in the order of cubes.
    pub spread: u32,
    /// Number of heads of keys.
    pub kv_heads: u32,
    /// Query heads per head of keys.
    pub heads_per_kv: u32,
    /// Query heads per cube.
    pub heads_per_share: u32,
    /// Number of batch entries.
    pub batch: u32,
    /// Number of keys.
    pub seq_kv: u32,
    /// Number of queries.
    pub seq_q: u32,
    /// Places per query head in the stats and the scratch.
    pub pitch: u32,
    /// Vector of eight elements at which dV begins.
    pub second: u32,
    /// Number of counters. The counter of tickets comes after them.
    pub counters: u32,
    /// Number of first tiles, which add dQ to a second scratch.
    pub apart: u32,
    /// Row at which the second scratch begins.
    pub rows: u32,
}

/// A tile of keys.
#[derive(CubeType, Clone, Copy)]
pub struct OwnTile {
    /// Its index in the order of decreasing work.
    pub rank: u32,
    pub kv_head: u32,
    /// Its share of the query heads of that head.
    pub share: u32,
    pub batch: u32,
    /// Location of its rows: see [`own_rows`].
    pub rows: u32,
    /// Word of the first entry and number of steps, for the cube's first query head.
    pub entry: u32,
    pub steps: u32,
}

/// Number of heads of keys, times shares, of all batch entries.
#[cube]
fn heads_in_turn(lengths: &Lengths, #[comptime] t: BackwardTile) -> u32 {
    lengths.kv_heads * lengths.batch * comptime!(t.shares as u32)
}

/// Returns the first query head of a share of those of a head of keys.
#[cube]
pub fn first_head(lengths: &Lengths, kv_head: u32, share: u32, #[comptime] t: BackwardTile) -> u32 {
    let mut head = kv_head * lengths.heads_per_kv;
    if comptime!(t.shares > 1) {
        head += share * lengths.heads_per_share;
    }
    head
}

/// Returns the number of query heads of a cube.
#[cube]
pub fn heads_of_cube(lengths: &Lengths, #[comptime] t: BackwardTile) -> u32 {
    let mut heads = lengths.heads_per_kv;
    if comptime!(t.shares > 1) {
        heads = lengths.heads_per_share;
    }
    heads
}

/// Returns tile `index` of the launch. Heads alternate: tiles of one head wait for each other, so few of them should run at once, but those that do share
/// what they read in the cache.
#[cube]
pub fn tile_of_launch(
    plan: &[u32],
    parts: &PlanParts,
    lengths: &Lengths,
    index: u32,
    #[comptime] t: BackwardTile,
) -> OwnTile {
    let chunk = index / (lengths.tiles * lengths.spread);
    let within = index % (lengths.tiles * lengths.spread);
    let first = chunk * lengths.spread;
    let turns = lengths.spread.min(heads_in_turn(lengths, t) - first);
    let outer = first + within % turns;
    let rank = within / turns;
    let mut of_keys = outer;
    let mut share = 0u32;
    if comptime!(t.shares > 1) {
        share = outer % comptime!(t.shares as u32);
        of_keys = outer / comptime!(t.shares as u32);
    }
    let kv_head = of_keys % lengths.kv_heads;
    let batch = of_keys / lengths.kv_heads;
    let head = first_head(lengths, kv_head, share, t) as usize;
    let record0 = plan[parts.heads + batch as usize * parts.batch + head] as usize;
    let ranked = parts.order + (record0 + rank as usize) * 4;
    OwnTile {
        rank,
        kv_head,
        share,
        batch,
        rows: own_rows(parts, record0, plan[ranked], comptime!(t.own_shape())),
        entry: parts.entries as u32 + plan[ranked + 1] * comptime!(t.entry_words() as u32),
        steps: plan[ranked + 2],
    }
}

/// Rank that marks no tile.
pub const NONE: u32 = u32::MAX;

/// Writes tile `index` to shared memory as the cube's `turn`-th, because finding it takes five divisions and three dependent reads.
#[cube]
pub fn cache_tile(
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

/// Returns the cube's `turn`-th tile from shared memory.
#[cube]
pub fn cached_tile(base: u32, turn: u32, #[comptime] t: BackwardTile) -> OwnTile {
    let slot = base + comptime!(t.slots()) + (turn & 1) * 32;
    OwnTile {
        rank: shared_load(slot),
        kv_head: shared_load(slot + 4),
        // A persistent cube has no shares.
        share: 0u32,
        batch: shared_load(slot + 8),
        rows: shared_load(slot + 12),
        entry: shared_load(slot + 16),
        steps: shared_load(slot + 20),
    }
}

/// Returns the tile of a cube. If it is the cube's only one, it is found again instead of kept in registers.
#[cube]
pub fn current_tile(
    plan: &[u32],
    parts: &PlanParts,
    lengths: &Lengths,
    own: &OwnTile,
    #[comptime] t: BackwardTile,
) -> OwnTile {
    if comptime!(t.persistent) {
        OwnTile {
            rank: own.rank,
            kv_head: own.kv_head,
            share: own.share,
            batch: own.batch,
            rows: own.rows,
            entry: own.entry,
            steps: own.steps,
        }
    } else {
        tile_of_launch(plan, parts, lengths, uniform(CUBE_POS_X), t)
    }
}

/// Returns the address of the keys of the cube's `turn`-th tile, which its values follow.
#[cube]
pub fn own_address(base: u32, turn: u32, #[comptime] t: BackwardTile) -> u32 {
    let mut at = base + comptime!(t.k_offset() as u32);
    if comptime!(t.persistent) {
        at += (turn & 1) * comptime!(2 * t.a_bytes() as u32);
    }
    at
}

/// Waits for the keys and values of the cube's `turn`-th tile.
#[cube]
pub fn wait_for_own(base: u32, turn: u32, #[comptime] t: BackwardTile) {
    if comptime!(t.persistent) {
        barrier_wait(base + comptime!(t.own()) + (turn & 1) * 8, (turn / 2) & 1);
    } else {
        barrier_wait(base + comptime!(t.own()), 0u32);
    }
}

/// Returns the word of the record of a tile for a query head. All patterns rank tiles in the same order.
#[cube]
pub fn record_of(plan: &[u32], parts: &PlanParts, heads_at: usize, head: u32, rank: u32) -> usize {
    parts.order + (plan[heads_at + head as usize] + rank) as usize * 4 + 1
}

/// Loads the keys and values of a tile into the memory of the cube's `turn`-th tile.
#[cube]
pub fn load_tile(
    plan: &[u32],
    loads: &Loads,
    own: &OwnTile,
    turn: u32,
    #[comptime] t: BackwardTile,
) {
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
        // Distributed over the warps, because lanes of one warp would wait for each other.
        let mut index = unit / 32;
        while index < comptime!(2 * t.a_boxes() as u32) {
            let boxes = comptime!(t.a_boxes() as u32);
            let mut map = loads.k;
            if index >= boxes {
                map = loads.v;
            }
            let mut start = target;
            if index >= boxes {
                start += comptime!(t.a_bytes() as u32);
            }
            load_own(
                map,
                plan,
                start,
                bar,
                own.rows,
                index % boxes,
                loads.class_len,
                own.kv_head,
                own.batch,
                t.base,
            );
            index += comptime!(t.warps());
        }
    }
}

/// Sources and targets of loads.
#[derive(CubeType, Clone, Copy)]
pub struct Loads {
    pub k: u64,
    pub v: u64,
    pub q: u64,
    pub grad_out: u64,
    pub stats: u64,
    pub base: u32,
    pub class_len: u32,
    /// Number of query heads.
    pub heads: u32,
}

/// The next step to load.
#[derive(CubeType)]
pub struct Cursor {
    /// Rank and batch entry of its tile.
    pub rank: RuntimeCell<u32>,
    pub batch: RuntimeCell<u32>,
    /// Query head, and the end of the tile's query heads, exclusive.
    pub head: RuntimeCell<u32>,
    pub end: RuntimeCell<u32>,
    /// Word of the head's first entry.
    pub entry: RuntimeCell<usize>,
    pub j: RuntimeCell<u32>,
    /// Number of steps of the head.
    pub steps: RuntimeCell<u32>,
    /// Steps loaded so far, over all tiles.
    pub loaded: RuntimeCell<u32>,
    /// Whether it belongs to the tile after the current one.
    pub ahead: RuntimeCell<u32>,
}

/// Moves the cursor to the beginning of a tile.
#[cube]
pub fn turn_to(own: &OwnTile, lengths: &Lengths, cursor: &Cursor, #[comptime] t: BackwardTile) {
    let head = first_head(lengths, own.kv_head, own.share, t);
    cursor.rank.store(own.rank);
    cursor.batch.store(own.batch);
    cursor.head.store(head);
    cursor.end.store(head + heads_of_cube(lengths, t));
    cursor.entry.store(own.entry as usize);
    cursor.j.store(0u32);
    cursor.steps.store(uniform(own.steps));
}

/// Reads the record of the cursor's head.
#[cube]
pub fn open(plan: &[u32], parts: &PlanParts, cursor: &Cursor, #[comptime] t: BackwardTile) {
    let heads_at = parts.heads + cursor.batch.read() as usize * parts.batch;
    let head = cursor.head.read();
    let record = record_of(plan, parts, heads_at, head, cursor.rank.read());
    cursor
        .entry
        .store(parts.entries + plan[record] as usize * comptime!(t.entry_words()));
    cursor.j.store(0u32);
    cursor.steps.store(uniform(plan[record + 1]));
}

/// Moves the cursor to the next head of its tile that has a step.
#[cube]
pub fn skip_to_step(plan: &[u32], parts: &PlanParts, cursor: &Cursor, #[comptime] t: BackwardTile) {
    while cursor.j.read() >= cursor.steps.read() && cursor.head.read() + 1 < cursor.end.read() {
        cursor.head.store(cursor.head.read() + 1);
        open(plan, parts, cursor, t);
    }
}

/// Loads the cursor's step, if there is one, once its buffer is free. The step is of the current tile, the cube's `turn`-th, or else of the next one. All
/// units must call it together.
#[cube]
pub fn load_next(
    plan: &[u32],
    parts: &PlanParts,
    loads: &Loads,
    lengths: &Lengths,
    turn: u32,
    cursor: &Cursor,
    #[comptime] t: BackwardTile,
) {
    skip_to_step(plan, parts, cursor, t);
    if comptime!(t.persistent) {
        if cursor.j.read() >= cursor.steps.read() && cursor.ahead.read() == 0 {
            let next = cached_tile(loads.base, turn + 1, t);
            if next.rank != NONE {
                cursor.ahead.store(1u32);
                turn_to(&next, lengths, cursor, t);
                skip_to_step(plan, parts, cursor, t);
            }
        }
    }
    if cursor.j.read() < cursor.steps.read() {
        let boxes = comptime!((t.entries() * t.spans()) as u32);
        let all = comptime!((2 * t.entries() * t.spans() + t.entries()) as u32);
        let stage = cursor.loaded.read() % comptime!(t.stages as u32);
        let parity = (cursor.loaded.read() / comptime!(t.stages as u32)) & 1;
        let full = loads.base + comptime!(t.full()) + stage * 8;
        // Index of the box that the unit loads: those of q come first, then dO, then the stats.
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
                + ((cursor.j.read() * comptime!(t.entries() as u32) + which)
                    * comptime!(t.entry_words() as u32)) as usize;
            let at = plan[word] * comptime!(t.group as u32);
            if index >= 2 * boxes {
                let target = loads.base
                    + comptime!(t.stats_offset() as u32)
                    + stage * comptime!(t.stats_bytes() as u32)
                    + which * comptime!((t.group * 8).max(128) as u32);
                let column = at * 2;
                let row = cursor.batch.read() * loads.heads + cursor.head.read();
                load_line(loads.stats, target, full, column, row);
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
                let (head, batch) = (cursor.head.read(), cursor.batch.read());
                load_at(
                    map,
                    target,
                    full,
                    span,
                    at,
                    loads.class_len,
                    head,
                    batch,
                    t.residue,
                );
            }
        }
        cursor.j.store(cursor.j.read() + 1);
        cursor.loaded.store(cursor.loaded.read() + 1);
    }
}
