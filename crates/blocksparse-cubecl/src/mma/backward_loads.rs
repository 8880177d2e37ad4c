//! Loads of the backward kernel: rows of a step and their positions, one or two steps ahead.

// Compile-time conditions stay separate from run-time ones.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use super::gather::*;
use super::product::{lane_cols, lane_depth, lane_rows};
use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::{Listing, MainloopOperands, PlanParts};

/// Zeros the padding of rows beyond their widths, in the tile's own rows and in all stages.
#[cube]
pub fn clear_rows(base: u32, #[comptime] t: Tile) {
    clear_beyond(
        base + comptime!(t.a1_offset() as u32),
        comptime!(t.rows()),
        t.head_dim,
        t,
    );
    let rows = comptime!(t.rows());
    clear_beyond(base + comptime!(t.a2_offset() as u32), rows, t.value_dim, t);
    let target = base + comptime!(t.b1_offset(true) as u32);
    clear_beyond(target, comptime!(t.stages * t.cols), t.head_dim, t);
    let target = base + comptime!(t.b2_offset(true) as u32);
    clear_beyond(target, comptime!(t.stages * t.cols), t.value_dim, t);
}

/// Starts to copy the tile's own rows of a head, as far as the launch needs them.
#[cube]
pub fn copy_own_rows(
    operands: &MainloopOperands<Box<[u32]>>,
    strides: &MainloopOperands<Strides>,
    base: u32,
    batch: u32,
    head: u32,
    #[comptime] t: Tile,
) {
    copy_rows(
        head_address(address::<u32>(&operands.a1[..]), &strides.a1, batch, head),
        strides.a1.row,
        base,
        base + comptime!(t.a1_offset() as u32),
        comptime!(t.rows()),
        t.head_dim,
        t,
    );
    if comptime!(t.outputs.first()) {
        let head = head_address(address::<u32>(&operands.a2[..]), &strides.a2, batch, head);
        let target = base + comptime!(t.a2_offset() as u32);
        let rows = comptime!(t.rows());
        copy_rows(head, strides.a2.row, base, target, rows, t.value_dim, t);
    }
}

/// Shared-memory addresses from which a lane reads the operands of a warp's products. Those of a step are in its first stage.
#[derive(CubeType, Clone, Copy)]
pub struct OperandPlaces {
    /// Own rows as left operands.
    pub a1_rows: u32,
    pub a2_rows: u32,
    /// Rows of a step as columns of s and of dp.
    pub b1_cols: u32,
    pub b2_cols: u32,
    /// Rows of a step as the depth of the gradients.
    pub b1_rows: u32,
    pub b2_rows: u32,
    /// lse and delta of a step's rows.
    pub stats: u32,
}

#[cube]
pub fn operand_places(base: u32, warp_rows: u32, lane: u32, #[comptime] t: Tile) -> OperandPlaces {
    let a1 = base + comptime!(t.a1_offset() as u32);
    let a2 = base + comptime!(t.a2_offset() as u32);
    let a1_rows =
        a1 + warp_rows * comptime!(t.pitch(t.head_dim) as u32) + lane_rows(lane, t.head_dim, t);
    let a2_rows =
        a2 + warp_rows * comptime!(t.pitch(t.value_dim) as u32) + lane_rows(lane, t.value_dim, t);
    let b1 = base + comptime!(t.b1_offset(true) as u32);
    let b2 = base + comptime!(t.b2_offset(true) as u32);
    OperandPlaces {
        a1_rows,
        a2_rows,
        b1_cols: b1 + lane_cols(lane, t.head_dim, t),
        b2_cols: b2 + lane_cols(lane, t.value_dim, t),
        b1_rows: b1 + lane_depth(lane, t.head_dim, t),
        b2_rows: b2 + lane_depth(lane, t.value_dim, t),
        stats: base + comptime!(t.stats_at(0) as u32) + lane % 4 * 16,
    }
}

/// Sources and targets of copies.
#[derive(CubeType, Clone, Copy)]
pub struct Loads {
    pub b1: u64,
    pub b2: u64,
    pub stats: u64,
    pub base: u32,
    pub batch: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Query heads per head of b1 and b2.
    pub divisor: u32,
    /// Places per head in the stats.
    pub pitch: u32,
}

/// The step whose positions are computed next.
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
}

/// The unit's column of a step.
#[derive(CubeType, Clone, Copy)]
pub struct Found {
    pub place: u32,
    /// Head of the step, or [`NOWHERE`] after the last step.
    pub head: u32,
}

/// Reads the record of the cursor's head.
#[cube]
pub fn open(plan: &[u32], parts: &PlanParts, record: usize, cursor: &Cursor) {
    cursor
        .entry
        .store(parts.entries + plan[record] as usize * 2);
    cursor.j.store(0u32);
    cursor.steps.store(uniform(plan[record + 1]));
}

/// Returns the place of the unit's column in the cursor's step, and advances the cursor. All units must call it together.
#[cube]
pub fn next_place(
    plan: &[u32],
    parts: &PlanParts,
    heads_at: usize,
    tile: u32,
    cursor: &Cursor,
    #[comptime] t: Tile,
) -> Found {
    if comptime!(t.columns()) {
        while cursor.j.read() >= cursor.steps.read() && cursor.head.read() + 1 < cursor.end {
            cursor.head.store(cursor.head.read() + 1);
            let first_record = plan[heads_at + cursor.head.read() as usize];
            let record = parts.tiles + (first_record + tile) as usize * 3;
            open(plan, parts, record, cursor);
        }
    }
    let mut place = 0u32;
    let mut head = comptime!(NOWHERE).runtime();
    if cursor.j.read() < cursor.steps.read() {
        head = cursor.head.read();
        let col = UNIT_POS_X;
        if col < comptime!(t.cols as u32) {
            let entry =
                cursor.j.read() * comptime!(t.entries() as u32) + col / comptime!(t.group as u32);
            place = plan[cursor.entry.read() + (entry * 2) as usize] * comptime!(t.group as u32)
                + col % comptime!(t.group as u32);
        }
        cursor.j.store(cursor.j.read() + 1);
    }
    Found { place, head }
}

/// Writes the positions and the head of step `step` to its slot.
#[cube]
pub fn store_place(
    base: u32,
    step: u32,
    found: &Found,
    listing: &Listing,
    len: u32,
    #[comptime] t: Tile,
) {
    let target = base + comptime!(t.slot_offset() as u32) + slot_of(step, t);
    if UNIT_POS_X < comptime!(t.cols as u32) {
        shared_store(
            target + UNIT_POS_X * 4,
            position_at(found.place, listing, len, t),
        );
    }
    if UNIT_POS_X == 0 {
        shared_store(target + comptime!(t.cols as u32 * 4), found.head);
    }
}

/// Starts to copy the rows of step `done`, if it exists. `place` is that of the unit's column.
#[cube]
pub fn copy_step(
    loads: &Loads,
    b1_strides: &Strides,
    b2_strides: &Strides,
    done: u32,
    place: u32,
    #[comptime] t: Tile,
) {
    let stage = done & 1;
    let slot = loads.base + comptime!(t.slot_offset() as u32) + slot_of(done, t);
    let head = uniform(shared_load(slot + comptime!(t.cols as u32 * 4)));
    if head != comptime!(NOWHERE) {
        let inner = head / loads.divisor;
        copy_rows(
            head_address(loads.b1, b1_strides, loads.batch, inner),
            b1_strides.row,
            slot,
            loads.base
                + comptime!(t.b1_offset(true) as u32)
                + stage * comptime!(t.b1_bytes() as u32),
            t.cols,
            t.head_dim,
            t,
        );
        copy_rows(
            head_address(loads.b2, b2_strides, loads.batch, inner),
            b2_strides.row,
            slot,
            loads.base
                + comptime!(t.b2_offset(true) as u32)
                + stage * comptime!(t.b2_bytes() as u32),
            t.cols,
            t.value_dim,
            t,
        );
        if comptime!(t.columns()) {
            if UNIT_POS_X < comptime!(t.cols as u32) {
                let exists = place < loads.pitch;
                let row =
                    (loads.batch * loads.heads + head) * loads.pitch + select(exists, place, 0u32);
                copy_pair(
                    loads.base
                        + comptime!(t.stats_at(0) as u32)
                        + stage * comptime!(t.stats_bytes() as u32)
                        + UNIT_POS_X * 8,
                    loads.stats + u64::cast_from(row) * 8,
                    select(exists, 8u32, 0u32),
                );
            }
        }
    }
}
