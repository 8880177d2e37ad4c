//! Loads of the forward kernel: a tile's queries, and the keys and values of its steps.

// Compile-time conditions stay separate from run-time ones, and kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::tiles::Tile;
use crate::arch::sm90::*;
use crate::shared::addressing::PlanWords;
use crate::shared::own_rows::own_place;

/// Initialises the barriers of a cube, and stores its head of keys in shared memory. All units must call it together.
#[cube]
pub fn init_barriers(base: u32, kv_head: u32, #[comptime] t: Tile) {
    if UNIT_POS_X == 0 {
        barrier_init(base, 1u32);
        #[unroll]
        for i in 0..comptime!(t.stages as u32) {
            barrier_init(base + comptime!(t.k_full() + 8 * i), 1u32);
            barrier_init(base + comptime!(t.v_full() + 8 * i), 1u32);
            barrier_init(base + comptime!(t.k_empty() + 8 * i), comptime!(t.warps()));
            barrier_init(base + comptime!(t.v_empty() + 8 * i), comptime!(t.warps()));
        }
        barrier_fence();
        shared_store(base + comptime!(t.kv_head_offset()), kv_head);
    }
    sync_cube();
}

/// Loads the queries of a tile, which are complete at the barrier at `base`. All units must call it together.
#[cube]
pub fn load_queries(
    map: u64,
    plan: &[u32],
    rows: u32,
    head: u32,
    loads: &Loads,
    #[comptime] t: Tile,
) {
    let base = loads.base;
    if UNIT_POS_X == 0 {
        barrier_expect(base, comptime!(t.a_bytes()));
    }
    if UNIT_POS_X < comptime!(t.a_boxes() as u32) {
        let span = UNIT_POS_X % comptime!(t.spans() as u32);
        let row = UNIT_POS_X / comptime!(t.spans() as u32) * comptime!(t.a_group() as u32);
        load_at(
            map,
            base + comptime!(t.q_offset() as u32)
                + span * comptime!((t.rows() * ROW) as u32)
                + row * comptime!(ROW as u32),
            base,
            span,
            own_place(plan, rows, row, comptime!(t.own_shape())),
            loads.class_len,
            head,
            loads.batch,
            t.residue,
        );
    }
}

/// The steps of a cube's tile.
#[derive(CubeType, Clone, Copy)]
pub struct TileSteps {
    /// Word of the first entry.
    pub entry: usize,
    /// Word of the masks.
    pub masks: usize,
    pub steps: u32,
    /// Number of steps with masks. They come first.
    pub masked: u32,
}

/// Returns the word of the first entry of step `j`.
#[cube]
pub fn entry_of(own: &TileSteps, j: u32, #[comptime] t: Tile) -> usize {
    own.entry + (j * comptime!((t.entries() * t.entry_words()) as u32)) as usize
}

/// Sources and targets of loads.
#[derive(CubeType, Clone, Copy)]
pub struct Loads {
    pub k: u64,
    pub v: u64,
    pub base: u32,
    /// The unit's warp and lane.
    pub warp: u32,
    pub lane: u32,
    pub batch: u32,
    pub class_len: u32,
    pub kept: UnitBox,
}

/// The box of each step that a unit loads. Boxes are distributed over the warps, and within a warp over its lanes.
#[derive(CubeType, Clone, Copy)]
pub struct UnitBox {
    /// Whether the unit announces the bytes of a step to the barrier.
    announces: bool,
    /// Whether the unit has a box.
    active: bool,
    /// Entry of the step that has the box's place.
    entry: u32,
    /// Span of 64 columns.
    span: u32,
    /// Head of keys.
    head: u32,
}

#[cube]
pub fn unit_box(base: u32, unit: u32, #[comptime] t: Tile) -> UnitBox {
    let lane = unit % 32;
    let index = unit / 32 + lane * comptime!(t.warps());
    UnitBox {
        announces: unit == 0,
        active: index < comptime!(t.boxes() as u32) && lane < comptime!(t.lane_boxes() as u32),
        entry: index / comptime!(t.spans() as u32),
        span: index % comptime!(t.spans() as u32),
        head: shared_load(base + comptime!(t.kv_head_offset())),
    }
}

/// Returns the unit's box: from registers if there are enough, else recomputed.
#[cube]
fn box_of(loads: &Loads, #[comptime] t: Tile) -> UnitBox {
    if comptime!(t.overlap) {
        UnitBox {
            announces: loads.kept.announces,
            active: loads.kept.active,
            entry: loads.kept.entry,
            span: loads.kept.span,
            head: loads.kept.head,
        }
    } else {
        unit_box(loads.base, unit(), t)
    }
}

/// Returns the buffer of step `j`.
#[cube]
pub fn stage(j: u32, #[comptime] t: Tile) -> u32 {
    j % comptime!(t.stages as u32)
}

/// Returns the parity of the phase in which the buffer of step `j` becomes full.
#[cube]
fn parity(j: u32, #[comptime] t: Tile) -> u32 {
    (j / comptime!(t.stages as u32)) & 1
}

/// Returns the descriptor of a buffer of keys, given that of the first one.
#[cube]
pub fn buffer(first: u64, stage: u32, #[comptime] t: Tile) -> u64 {
    first + u64::cast_from(stage * comptime!((t.b_bytes() >> 4) as u32))
}

/// Returns the descriptor of a buffer of values, given that of the first one.
#[cube]
pub fn values(first: u64, stage: u32, #[comptime] t: Tile) -> u64 {
    first + u64::cast_from(stage * comptime!((t.value_bytes() >> 4) as u32))
}

/// Returns the place of this unit's box of step `j`.
#[cube]
pub fn entry_position(
    plan: &[u32],
    own: &TileSteps,
    loads: &Loads,
    j: u32,
    #[comptime] t: Tile,
) -> u32 {
    let its = box_of(loads, t);
    let mut at = 0u32;
    if j < own.steps && its.active {
        let entry = j * comptime!(t.entries() as u32) + its.entry;
        let word = own.entry + (entry * comptime!(t.entry_words() as u32)) as usize;
        at = plan[word] * comptime!(t.group as u32);
    }
    at
}

/// Loads this unit's box of the keys or values of step `j`.
#[cube]
pub fn load_step(loads: &Loads, j: u32, at: u32, #[comptime] values: bool, #[comptime] t: Tile) {
    let its = box_of(loads, t);
    let stage = stage(j, t);
    let full = comptime!(if values { t.v_full() } else { t.k_full() });
    let offset = comptime!((if values { t.v_offset() } else { t.k_offset() }) as u32);
    let bytes = comptime!(if values { t.value_bytes() } else { t.b_bytes() });
    let bar = loads.base + full + stage * 8;
    let mut map = loads.k;
    let mut active = its.active;
    let mut place = at;
    if comptime!(values) {
        map = loads.v;
        if comptime!(t.fp8) {
            place = at / comptime!(FP8_COLUMNS as u32) * comptime!(t.value_dim as u32);
        }
        // Values may have fewer spans than keys.
        if comptime!(t.value_spans() < t.spans()) {
            active = active && its.span < comptime!(t.value_spans() as u32);
        }
    }
    // Bytes may arrive before they are announced, but the phase cannot end without the announcement.
    if its.announces {
        barrier_expect(bar, bytes);
    }
    if active {
        let target = loads.base
            + offset
            + stage * comptime!(bytes as u32)
            + its.span * comptime!((t.cols * ROW) as u32)
            + its.entry * comptime!(t.box_bytes(values) as u32);
        load_at(
            map,
            target,
            bar,
            its.span,
            place,
            loads.class_len,
            its.head,
            loads.batch,
            t.residue,
        );
    }
}

/// Waits for the keys of step `j`.
#[cube]
pub fn wait_keys(base: u32, j: u32, #[comptime] t: Tile) {
    barrier_wait(base + comptime!(t.k_full()) + stage(j, t) * 8, parity(j, t));
}

/// Waits for the values of step `j`.
#[cube]
pub fn wait_values(base: u32, j: u32, #[comptime] t: Tile) {
    barrier_wait(base + comptime!(t.v_full()) + stage(j, t) * 8, parity(j, t));
}

/// Waits until the buffer of the keys or values of step `j` is free, and loads them.
#[cube]
fn load_when_free(loads: &Loads, j: u32, at: u32, #[comptime] values: bool, #[comptime] t: Tile) {
    let empty = comptime!(if values { t.v_empty() } else { t.k_empty() });
    barrier_wait(loads.base + empty + stage(j, t) * 8, 1 - parity(j, t));
    load_step(loads, j, at, values, t);
}

/// Places of the next boxes of keys and of values that a unit loads.
#[derive(CubeType)]
pub struct BoxPlaces {
    pub k: u32,
    pub v: u32,
}

/// Loads the keys and values of a step after `j`. With overlap, values are needed a step later, so those of the previous step are loaded.
#[cube]
pub fn load_later(
    next: &mut BoxPlaces,
    loads: &Loads,
    plan: &PlanWords,
    own: &TileSteps,
    j: u32,
    #[comptime] t: Tile,
) {
    if loads.warp < comptime!(t.loading_warps()) && j >= comptime!(t.lag as u32) {
        let step = j + comptime!((t.stages - t.lag) as u32);
        if comptime!(t.overlap) {
            let before = step - 1;
            if before >= comptime!(t.stages as u32) && before < own.steps {
                load_when_free(loads, before, next.v, true, t);
            }
            if step < own.steps {
                load_when_free(loads, step, next.k, false, t);
            }
            next.v = next.k;
        } else if step < own.steps {
            load_when_free(loads, step, next.k, false, t);
            load_when_free(loads, step, next.k, true, t);
        }
        next.k = entry_position(&plan.words[..], own, loads, step + 1, t);
    }
}
