//! The steps of a query's walk: their keys and values, copied a step ahead by all warps, and which of them exist.

// Kernels have no `div_ceil`.
#![allow(clippy::manual_div_ceil)]

use cubecl::prelude::*;

use super::tile::{STAGES, WarpgroupTile};
use crate::kernels::hopper::asm::*;
use crate::kernels::hopper::swizzled::{ROWS_AT_A_TIME, Spans, copy_row, lane_row};
use crate::kernels::listed::gather::{
    QueryList, QueryWalk, Sources, head_of_row, position_of_key, query_walk,
};
use crate::kernels::listed::tile::HeadRows;
use crate::kernels::mma::asm::{lanes_that_differ, word_of_lane};
use crate::kernels::mma::gather::Strides;
use crate::kernels::mma::tile::NOWHERE;
use crate::kernels::shared::walk::Slice;

/// What a cube begins with.
#[derive(CubeType, Clone, Copy)]
pub struct Begun {
    pub walk: QueryWalk,
    pub steps: u32,
    /// As [`listed`] has it, of the first step.
    pub position: u32,
}

/// Makes the barriers of the steps of the cube's query, and looks at its list.
#[cube]
pub fn begin(
    base: u32,
    k: u64,
    v: u64,
    lists: &[i32],
    seq_q: u32,
    k_strides: &Strides,
    v_strides: &Strides,
    slice: &Slice,
    most: u32,
    warp: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) -> Begun {
    init_barriers(base + comptime!(t.full()), t);
    let rows = comptime!(t.head_rows());
    let walk = query_walk(k, v, seq_q, k_strides, v_strides, slice, most, rows);
    let (cols, block) = comptime!((t.cols as u32, t.block as u32));
    let steps = filled_steps(lists, &walk.list, lane, cols, block);
    let position = listed(lists, &walk.list, 0u32, warp, lane, t);
    Begun {
        walk,
        steps,
        position,
    }
}

/// Makes the barriers of a cube's steps.
#[cube]
fn init_barriers(full: u32, #[comptime] t: WarpgroupTile) {
    if UNIT_POS_X == 0 {
        #[unroll]
        for i in 0..comptime!(STAGES as u32) {
            barrier_init(full + comptime!(8 * i), comptime!(t.warps() as u32));
        }
        barrier_fence();
    }
}

/// The step behind the one of a stage is in the next one.
#[cube]
pub fn next_stage(stage: u32) -> u32 {
    let mut next = stage + 1;
    if next == comptime!(STAGES as u32) {
        next = 0u32;
    }
    next
}

/// Steps of so many keys up to the last one that has a key. Lists of single keys have none behind the first number that names none.
#[cube]
pub fn filled_steps(
    lists: &[i32],
    list: &QueryList,
    lane: u32,
    #[comptime] keys: u32,
    #[comptime] block: u32,
) -> u32 {
    let all = (list.most * block + keys - 1) / keys;
    let mut steps = all;
    if comptime!(block == 1) {
        steps = 0u32;
        let mut at = 0u32;
        while at < all {
            let j = at + lane;
            let mut has_keys = 0u32;
            if j < all {
                let first = lists[list.first + (j * keys) as usize];
                has_keys = select(first >= 0i32, 1u32, 0u32);
            }
            steps += total_across(has_keys);
            at += 32u32;
        }
    }
    uniform(steps)
}

/// The position of the lane's key of the warp's ones of step `j`, or [`NOWHERE`].
#[cube]
pub fn listed(
    lists: &[i32],
    list: &QueryList,
    j: u32,
    warp: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) -> u32 {
    let keys = comptime!(t.warp_keys() as u32);
    let flat = j * comptime!(t.cols as u32) + warp * keys + lane % keys;
    position_of_key(lists, list, flat, comptime!(t.block as u32))
}

/// Starts to copy the warp's keys and values of a step, whose positions its lanes have, and says which of them exist.
#[cube]
pub fn copy_step(
    base: u32,
    stage: u32,
    position: u32,
    sources: &Sources,
    warp: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) {
    let there = lanes_that_differ(position, comptime!(NOWHERE).runtime()) & comptime!(t.all());
    if lane == 0 {
        shared_store(base + comptime!(t.words()) + stage * 32 + warp * 4, there);
    }
    let step = base + comptime!(t.ring_offset() as u32) + stage * comptime!(t.step_bytes() as u32);
    let row = warp * comptime!(t.warp_keys() as u32);
    copy_keys(
        step,
        row,
        position,
        sources,
        lane,
        comptime!(t.warp_keys()),
        comptime!(t.keys()),
        comptime!(t.values()),
    );
}

/// Starts to copy so many of a step's keys and values, from `row` on, whose positions the lanes have in turn.
#[cube]
pub fn copy_keys(
    step: u32,
    row: u32,
    position: u32,
    sources: &Sources,
    lane: u32,
    #[comptime] keys: usize,
    #[comptime] of_keys: Spans,
    #[comptime] of_values: Spans,
) {
    #[unroll]
    for i in 0..comptime!(keys / ROWS_AT_A_TIME) {
        let own = comptime!((i * ROWS_AT_A_TIME) as u32) + lane_row(lane);
        let at = word_of_lane(position, own);
        let own = row + own;
        copy_row(
            step,
            own,
            sources.keys,
            at,
            sources.key_stride,
            lane,
            of_keys,
        );
        copy_row(
            step + comptime!(of_keys.bytes() as u32),
            own,
            sources.values,
            at,
            sources.value_stride,
            lane,
            of_values,
        );
    }
}

/// Starts to copy the rows of a query, which are `stride` pieces of 16 bytes apart, dealt to so many warps.
#[cube]
pub fn copy_heads(
    matrix: u32,
    first: u64,
    stride: u64,
    warp: u32,
    lane: u32,
    #[comptime] warps: usize,
    #[comptime] rows: HeadRows,
    #[comptime] of: Spans,
) {
    let mut four = warp;
    while four < comptime!((of.rows / ROWS_AT_A_TIME) as u32) {
        let row = four * comptime!(ROWS_AT_A_TIME as u32) + lane_row(lane);
        copy_row(matrix, row, first, head_of_row(row, rows), stride, lane, of);
        four += comptime!(warps as u32);
    }
}

/// Gives pairs with keys that do not exist no weight.
#[cube]
pub fn hide_missing<S: Size>(
    s_in: Vector<f32, S>,
    base: u32,
    stage: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) -> Vector<f32, S> {
    let mut s = s_in;
    let words = base + comptime!(t.words()) + stage * 32;
    let mut there = Array::<u32>::new(comptime!(t.warps()));
    let mut all = u32::MAX.runtime();
    #[unroll]
    for four in 0..comptime!(t.warpgroups) {
        let read = shared_load_words(words + comptime!((16 * four) as u32));
        #[unroll]
        for i in 0..4usize {
            let word = read.extract(i);
            there[comptime!(4 * four + i)] = word;
            all &= word;
        }
    }
    if uniform(all) != comptime!(t.all()) {
        let infinity = f32::new(f32::NEG_INFINITY);
        #[unroll]
        for eight in 0..comptime!(t.cols / 8) {
            let (word, shift) = comptime!((8 * eight / t.warp_keys(), 8 * eight % t.warp_keys()));
            let own = there[word] >> (lane % 4 * 2 + comptime!(shift as u32));
            #[unroll]
            for i in 0..2usize {
                let exists = own & comptime!(1u32 << i) != 0u32;
                let at = comptime!(4 * eight + i);
                s.insert(at, select(exists, s.extract(at), infinity));
                let at = comptime!(at + 2);
                s.insert(at, select(exists, s.extract(at), infinity));
            }
        }
    }
    s
}
