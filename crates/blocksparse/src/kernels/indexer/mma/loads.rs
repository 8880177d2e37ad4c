//! What is copied to shared memory, in pieces of 16 bytes: zeros of what is not there.

use cubecl::prelude::*;

use super::super::pairs::{Sizes, key_of};
use super::tile::{PIECE, SumTile, UNITS, WARPS};
use crate::kernels::mma::asm::{copy_piece, copy_word, load_matrices, wait_copies};
use crate::kernels::mma::tile::NOWHERE;
use crate::kernels::shared::asm::shared_store;
use crate::kernels::shared::walk::Four;

/// What a cube works on.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Work {
    pub entry: usize,
    /// The first key, or the first place of a list.
    pub column0: usize,
    /// The first query that is there, and the one behind the last.
    pub first: usize,
    pub end: usize,
    /// Shared memory.
    pub base: u32,
    pub warp: u32,
    pub lane: u32,
}

/// A step: queries from `row` on, and heads of each from `head0` on, of a head of keys.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Step {
    pub row: usize,
    pub head0: usize,
    pub kv_head: usize,
}

/// Starts to copy a step's queries, with what each of their heads has in `of_rows`.
#[cube]
pub(super) fn copy_queries(
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
    let unit = UNIT_POS_X as usize;
    let pieces = comptime!(t.columns() * t.pieces());
    // Not unrolled: places of several pieces would take the registers that keys need.
    let mut at = unit;
    while at < pieces {
        let column = at / comptime!(t.pieces());
        let piece = at % comptime!(t.pieces());
        let head = column % comptime!(t.heads);
        let row = step.row + column / comptime!(t.heads);
        let is_there =
            step.head0 + head < group && row < work.end && piece < comptime!(t.own_pieces());
        let place = (heads + head * s.seq_q + row) as u32;
        copy_piece(
            stage + (column * comptime!(t.pitch()) + piece * comptime!(PIECE)) as u32,
            q + (piece * comptime!(PIECE)) as u64,
            select(is_there, place, comptime!(NOWHERE).runtime()),
            comptime!(2 * t.width as u32).runtime(),
        );
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
            // A weight of 0; or a sum of exponentials beside which all are 0.
            let none = comptime!(if t.is_weights { f32::INFINITY } else { 0.0 });
            shared_store(target, comptime!(none.to_bits()).runtime());
        }
    }
}

/// Loads the keys of the warps as left operands, through the places of the steps, of which none may be in use.
#[cube]
pub(super) fn load_keys(
    k: u64,
    keys: &ComptimeOption<Box<[i32]>>,
    left: &mut Array<Vector<u32, Four>>,
    kv_head: usize,
    work: &Work,
    s: &Sizes,
    #[comptime] t: SumTile,
) {
    let unit = UNIT_POS_X as usize;
    let first = (work.entry * s.kv_heads + kv_head) * s.seq_kv;
    let pieces = comptime!(16 * WARPS * t.pieces());
    let lane = work.lane % 16 * comptime!(t.pitch() as u32) + work.lane / 16 * 16;
    let own = work.base + work.warp * comptime!(16 * t.pitch() as u32) + lane;
    #[unroll]
    for round in 0..comptime!(t.sixteens.div_ceil(t.stages)) {
        let from = comptime!(round * t.stages);
        let to = comptime!((from + t.stages).min(t.sixteens));
        sync_cube();
        #[unroll]
        for m in from..to {
            let stage = work.base + comptime!(((m - from) * t.stage_bytes()) as u32);
            let mut at = unit;
            while at < pieces {
                let row = at / comptime!(t.pieces());
                let piece = at % comptime!(t.pieces());
                let of_warp = row / 16 * comptime!(t.warp_keys()) + comptime!(16 * m) + row % 16;
                let column = work.column0 + of_warp;
                let within = column < s.columns;
                let column = select(within, column, 0usize);
                let key = key_of(keys, work.entry, work.first, column, s, t.is_listed);
                let is_there = within && key >= 0 && piece < comptime!(t.own_pieces());
                let place = (first + max(key, 0i32) as usize) as u32;
                copy_piece(
                    stage + (row * comptime!(t.pitch()) + piece * comptime!(PIECE)) as u32,
                    k + (piece * comptime!(PIECE)) as u64,
                    select(is_there, place, comptime!(NOWHERE).runtime()),
                    comptime!(2 * t.width as u32).runtime(),
                );
                at += comptime!(UNITS);
            }
        }
        wait_copies();
        sync_cube();
        #[unroll]
        for m in from..to {
            #[unroll]
            for depth in 0..comptime!(t.depth()) {
                left[comptime!(m * t.depth() + depth)] =
                    load_matrices(own, comptime!((m - from) * t.stage_bytes() + depth * 32));
            }
        }
    }
    // Steps come to the same places.
    sync_cube();
}
