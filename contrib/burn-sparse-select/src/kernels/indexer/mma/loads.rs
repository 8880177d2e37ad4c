//! Copies to shared memory, in pieces of 16 bytes, with zeros for absent rows.

use cubecl::prelude::*;

use crate::kernels::indexer::mma::tile::{PIECE, SumTile, UNITS, WARPS};
use crate::kernels::indexer::pairs::{Sizes, key_of};
use blocksparse_cubecl::arch::ptx::{shared_store, unit};
use blocksparse_cubecl::arch::sm80::{copy_piece, copy_word, load_matrices, wait_copies};
use blocksparse_cubecl::mma::tile::NOWHERE;
use blocksparse_cubecl::shared::addressing::Four;

/// Work of a cube.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Work {
    pub entry: usize,
    /// First key, or first index of a list.
    pub column0: usize,
    /// First query, and end of the queries (exclusive).
    pub first: usize,
    pub end: usize,
    /// Address of shared memory.
    pub base: u32,
    pub warp: u32,
    pub lane: u32,
}

/// A step: queries from `row` on, and heads of each from `head0` on, for one KV head.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Step {
    pub row: usize,
    pub head0: usize,
    pub kv_head: usize,
}

/// Index of a row in memory, if it exists.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Line {
    pub place: usize,
    pub is_there: bool,
}

/// Starts to copy piece `at` of a stage in shared memory.
#[cube]
pub(crate) fn copy_line(source: u64, line: Line, at: usize, stage: u32, #[comptime] t: SumTile) {
    let row = at / comptime!(t.pieces());
    let piece = at % comptime!(t.pieces());
    let is_there = line.is_there && piece < comptime!(t.own_pieces());
    copy_piece(
        stage + (row * comptime!(t.pitch()) + piece * comptime!(PIECE)) as u32,
        source + (piece * comptime!(PIECE)) as u64,
        select(is_there, line.place as u32, comptime!(NOWHERE).runtime()),
        comptime!(2 * t.width as u32).runtime(),
    );
}

/// Starts to copy a step's queries, with the `of_rows` entries of their heads.
#[cube]
pub(crate) fn copy_queries(
    q: u64,
    of_rows: u64,
    step: &Step,
    work: &Work,
    s: &Sizes,
    stage: u32,
    #[comptime] t: SumTile,
) {
    let group = s.heads / s.kv_heads;
    let heads = (work.entry * s.heads + step.kv_head * group + step.head0) * s.seq_q + s.start;
    // Read again in each step, which frees the registers of derived values in between.
    let unit = unit() as usize;
    // Not unrolled: addresses of several pieces would use registers that the keys need.
    let mut at = unit;
    while at < comptime!(t.columns() * t.pieces()) {
        let column = at / comptime!(t.pieces());
        let head = column % comptime!(t.heads);
        let row = step.row + column / comptime!(t.heads);
        let line = Line {
            place: heads + head * s.seq_q + row,
            is_there: step.head0 + head < group && row < work.end,
        };
        copy_line(q, line, at, stage, t);
        at += comptime!(UNITS);
    }
    if unit < comptime!(t.columns()) {
        let head = unit % comptime!(t.heads);
        let row = step.row + unit / comptime!(t.heads);
        let target = stage + comptime!(t.of_rows() as u32) + unit as u32 * 4;
        if step.head0 + head < group && row < work.end {
            let place = heads + head * s.seq_q + row;
            copy_word(target, of_rows + place as u64 * 4);
        } else {
            // A weight of 0, or an lse of +∞, which makes all exponentials 0.
            let none = comptime!(if t.is_weights { f32::INFINITY } else { 0.0 });
            shared_store(target, comptime!(none.to_bits()).runtime());
        }
    }
}

/// Returns the key of a query's column, if there is one.
#[cube]
pub(crate) fn key_line(
    keys: &ComptimeOption<Box<[i32]>>,
    entry: usize,
    kv_head: usize,
    row: usize,
    column: usize,
    s: &Sizes,
    #[comptime] is_listed: bool,
) -> Line {
    let within = column < s.columns;
    let column = select(within, column, 0usize);
    let key = key_of(keys, entry, row, column, s, is_listed);
    Line {
        place: (entry * s.kv_heads + kv_head) * s.seq_kv + max(key, 0i32) as usize,
        is_there: within && key >= 0,
    }
}

/// Loads the keys of the warps as left operands. Uses the memory of the stages, none of which may be in use.
#[cube]
pub(crate) fn load_keys(
    k: u64,
    keys: &ComptimeOption<Box<[i32]>>,
    left: &mut Array<Vector<u32, Four>>,
    kv_head: usize,
    work: &Work,
    s: &Sizes,
    #[comptime] t: SumTile,
) {
    #[unroll]
    for round in 0..comptime!(t.sixteens.div_ceil(t.stages)) {
        let from = comptime!(round * t.stages);
        let to = comptime!((from + t.stages).min(t.sixteens));
        sync_cube();
        #[unroll]
        for m in from..to {
            let stage = work.base + comptime!(((m - from) * t.stage_bytes()) as u32);
            let mut at = UNIT_POS_X as usize;
            while at < comptime!(16 * WARPS * t.pieces()) {
                let row = at / comptime!(t.pieces());
                let of_warp = row / 16 * comptime!(t.warp_keys()) + comptime!(16 * m) + row % 16;
                let column = work.column0 + of_warp;
                let line = key_line(
                    keys,
                    work.entry,
                    kv_head,
                    work.first,
                    column,
                    s,
                    t.is_listed,
                );
                copy_line(k, line, at, stage, t);
                at += comptime!(UNITS);
            }
        }
        wait_copies();
        sync_cube();
        #[unroll]
        for m in from..to {
            let stage = work.base + comptime!(((m - from) * t.stage_bytes()) as u32);
            load_left(left, stage, work, comptime!(m * t.depth()), t);
        }
    }
    // Steps reuse this memory.
    sync_cube();
}

/// Loads a warp's 16 rows of a stage as left operands, starting at element `first`.
#[cube]
pub(crate) fn load_left(
    left: &mut Array<Vector<u32, Four>>,
    stage: u32,
    work: &Work,
    #[comptime] first: usize,
    #[comptime] t: SumTile,
) {
    let lane = work.lane % 16 * comptime!(t.pitch() as u32) + work.lane / 16 * 16;
    let own = stage + work.warp * comptime!(16 * t.pitch() as u32) + lane;
    #[unroll]
    for depth in 0..comptime!(t.depth()) {
        left[comptime!(first + depth)] = load_matrices(own, comptime!(depth * 32));
    }
}
