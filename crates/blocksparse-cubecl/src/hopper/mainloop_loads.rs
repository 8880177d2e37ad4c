//! Loads of the kernels of the two mainloops: a tile's own rows, and the gathered rows of its steps.

// Compile-time conditions stay separate from run-time ones, and kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::rows::load_own;
use super::tiles::MainloopTile;
use crate::arch::sm90::*;
use crate::shared::addressing::PlanParts;

/// Lengths of a launch of a mainloop.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct MainloopLengths {
    /// Number of positions of the output's rows.
    pub len: u32,
    /// Places per head in the stats.
    pub pitch: u32,
    /// Query heads per head of keys.
    pub heads_per_kv: u32,
    /// Vector at which dV begins.
    pub second: u32,
}

/// Sources of a tile's own rows.
#[derive(CubeType, Clone, Copy)]
pub struct OwnRows {
    pub a1: u64,
    pub a2: u64,
    /// Location of the rows: see [`own_rows`](super::rows::own_rows).
    pub at: u32,
    pub class_len: u32,
    pub head: u32,
    pub batch: u32,
}

/// Loads a tile's own rows, which are complete at the barrier at `base`. All units must call it together.
#[cube]
pub fn load_own_rows(plan: &[u32], own: &OwnRows, base: u32, #[comptime] t: MainloopTile) {
    if unit() == 0 {
        barrier_expect(base, comptime!(2 * t.a_bytes()));
    }
    let a_boxes = comptime!(t.a_boxes() as u32);
    let warp = uniform(unit() / 32);
    if unit() % 32 == 0 {
        // Distributed over the warps, because lanes of one warp would wait for each other.
        let mut index = warp;
        while index < 2 * a_boxes {
            let mut map = own.a1;
            let mut start = base + comptime!(t.a1_offset() as u32);
            if index >= a_boxes {
                map = own.a2;
                start = base + comptime!(t.a2_offset() as u32);
            }
            load_own(
                map,
                plan,
                start,
                base,
                own.at,
                index % a_boxes,
                own.class_len,
                own.head,
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
    pub b1: u64,
    pub b2: u64,
    pub stats: u64,
    pub base: u32,
    pub class_len: u32,
    pub batch: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Query heads per head of b1 and b2.
    pub divisor: u32,
    /// Index of the unit's box of a step: those of b1 come first, then b2, then the stats. None if it exceeds the number of boxes.
    pub index: u32,
}

/// The next step to load.
#[derive(CubeType)]
pub struct Cursor {
    pub head: RuntimeCell<u32>,
    /// End of the range of heads, exclusive.
    pub end: u32,
    /// Word of the head's first entry.
    pub entry: RuntimeCell<usize>,
    pub j: RuntimeCell<u32>,
    /// Number of steps of the head.
    pub steps: RuntimeCell<u32>,
    /// Steps loaded so far, over all heads.
    pub loaded: RuntimeCell<u32>,
    /// Number of steps to load, if cubes share tiles.
    pub stretch: u32,
}

/// Reads the record of the cursor's head. The step index of the cursor is relative to that head.
#[cube]
pub fn open(plan: &[u32], parts: &PlanParts, record: usize, cursor: &Cursor) {
    cursor
        .entry
        .store(parts.entries + plan[record] as usize * 2);
    cursor.steps.store(uniform(plan[record + 1]));
}

/// Loads the cursor's step, if there is one, once its buffer is free. All units must call it together.
#[cube]
pub fn load_next(
    plan: &[u32],
    parts: &PlanParts,
    loads: &Loads,
    heads_at: usize,
    tile: u32,
    cursor: &Cursor,
    #[comptime] t: MainloopTile,
) {
    let columns = comptime!(t.columns());
    if comptime!(columns) {
        while cursor.j.read() >= cursor.steps.read() && cursor.head.read() + 1 < cursor.end {
            cursor.head.store(cursor.head.read() + 1);
            if comptime!(t.long_tiles) {
                // A cube's first step may be beyond the steps of its first heads.
                cursor.j.store(cursor.j.read() - cursor.steps.read());
            } else {
                cursor.j.store(0u32);
            }
            let first_record = plan[heads_at + cursor.head.read() as usize];
            let record = parts.tiles + (first_record + tile) as usize * 3;
            open(plan, parts, record, cursor);
        }
    }
    let mut is_there = cursor.j.read() < cursor.steps.read();
    if comptime!(t.long_tiles) {
        is_there = is_there && cursor.loaded.read() < cursor.stretch;
    }
    if is_there {
        let boxes = comptime!((t.entries() * t.spans()) as u32);
        let all =
            comptime!((2 * t.entries() * t.spans() + if columns { t.entries() } else { 0 }) as u32);
        let stage = cursor.loaded.read() % comptime!(t.stages as u32);
        let parity = (cursor.loaded.read() / comptime!(t.stages as u32)) & 1;
        let full = loads.base + comptime!(t.full()) + stage * 8;
        if loads.index < all {
            barrier_wait(loads.base + comptime!(t.empty()) + stage * 8, 1 - parity);
            if loads.index == 0 {
                barrier_expect(
                    full,
                    comptime!(2 * t.b_bytes() + if columns { t.stats_bytes() } else { 0 }),
                );
            }
            let mut which = loads.index % boxes;
            let span = which % comptime!(t.spans() as u32);
            which /= comptime!(t.spans() as u32);
            if loads.index >= 2 * boxes {
                which = loads.index - 2 * boxes;
            }
            let word = cursor.entry.read()
                + ((cursor.j.read() * comptime!(t.entries() as u32) + which) * 2) as usize;
            let at = plan[word] * comptime!(t.group as u32);
            if loads.index >= 2 * boxes {
                let target = loads.base
                    + comptime!(t.stats_offset() as u32)
                    + stage * comptime!(t.stats_bytes() as u32)
                    + which * comptime!((t.group * 8) as u32);
                let (column, row) = (at * 2, loads.batch * loads.heads + cursor.head.read());
                load_line(loads.stats, target, full, column, row);
            } else {
                let mut map = loads.b1;
                let mut start = loads.base + comptime!(t.b1_offset() as u32);
                if loads.index >= boxes {
                    map = loads.b2;
                    start = loads.base + comptime!(t.b2_offset() as u32);
                }
                let target = start
                    + stage * comptime!(t.b_bytes() as u32)
                    + span * comptime!((t.cols * ROW) as u32)
                    + which * comptime!((t.group * ROW) as u32);
                let head = cursor.head.read() / loads.divisor;
                load_at(
                    map,
                    target,
                    full,
                    span,
                    at,
                    loads.class_len,
                    head,
                    loads.batch,
                    t.residue,
                );
            }
        }
        cursor.j.store(cursor.j.read() + 1);
        cursor.loaded.store(cursor.loaded.read() + 1);
    }
}
