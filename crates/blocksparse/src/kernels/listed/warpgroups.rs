//! The forward kernel of many heads: a cube has one query, with 64 of the heads that share its list to a warpgroup, and walks its list on wgmma.
//!
//! ```text
//! every warpgroup, per step j of the list:
//!     wait until all warps' copies of K(j), V(j) are there    mbarrier
//!     start s = q · K(j)ᵀ                                     wgmma
//!     start this warp's rows of K(j + 1), V(j + 1)            cp.async, swizzled as TMA would
//!     p = exp2(s − m')                                        registers
//!     start x = p · V(j)                                      wgmma, p in registers
//!     say that this warp's copies of step j + 1 are there
//!     o = a · o + x
//! ```
//!
//! TMA gathers no single rows on these devices, so all warps copy. A warp says that its copies are there behind the softmax, so that they have that long to
//! come, and a warpgroup may be as far ahead of the other as the rest of a step: while one makes weights, the other has the tensor cores. What a step is copied
//! over was read two steps before, by everybody: who waits for step j knows that all warps are behind the softmax of step j − 1.

// Kernels have no `div_ceil` or `is_multiple_of`.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::gather::*;
use super::warpgroup_tile::{STAGES, WarpgroupTile};
use crate::kernels::hopper::asm::*;
use crate::kernels::hopper::output::{OutRow, OutShape, quad_sum, store_row};
use crate::kernels::hopper::rows::{ROW_PAIR, pack_all};
use crate::kernels::hopper::softmax::{add_scaled, softmax};
use crate::kernels::mma::asm::{
    address, commit_copies, copy_far_piece, copy_piece, lanes_that_differ, wait_copies,
    word_of_lane,
};
use crate::kernels::mma::gather::Strides;
use crate::kernels::mma::tile::NOWHERE;
use crate::kernels::shared::score::LOWEST_MAX;
use crate::kernels::shared::walk::{Four, Slice};

/// Pieces of 16 bytes of a span of 64 columns.
const PIECES: u32 = 8;

/// Rows of which a warp copies a span at a time.
const ROWS_AT_A_TIME: usize = 4;

/// As [`forward`](super::forward::forward) without other attention to carry on, of `out` in eights of elements.
#[cube(launch_unchecked)]
pub fn forward<S: Size, P: Size, O: Size>(
    q: &[u32],
    k: &[u32],
    v: &[u32],
    lists: &[i32],
    out: &mut [Vector<u32, Four>],
    lse: &mut [f32],
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    slice: Slice,
    most: u32,
    log2_scale: f32,
    #[comptime] t: WarpgroupTile,
) {
    let rows = comptime!(t.head_rows());
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let full = base + comptime!(t.full());
    if UNIT_POS_X == 0 {
        #[unroll]
        for i in 0..comptime!(STAGES as u32) {
            barrier_init(full + comptime!(8 * i), comptime!(t.warps() as u32));
        }
        barrier_fence();
    }
    let walk = query_walk(
        address::<u32>(k),
        address::<u32>(v),
        q_strides.len,
        &k_strides,
        &v_strides,
        &slice,
        most,
        rows,
    );
    let steps = filled_steps(lists, &walk.list, lane, t);
    let mut position = listed(lists, &walk.list, 0u32, warp, lane, t);
    let first_query = rows_of_query(address::<u32>(q), &q_strides, &walk);
    copy_heads(base, first_query, q_strides.head, warp, lane, t);
    copy_step(base, 0u32, position, &walk.sources, warp, lane, t);
    position = listed(lists, &walk.list, 1u32, warp, lane, t);
    sync_cube();
    copies_are_there(full, lane);

    let group = warp / 4;
    let q_desc = descriptor(base + group * comptime!((64 * ROW) as u32), 16usize);
    let ring = base + comptime!(t.ring_offset() as u32);
    let k_desc = descriptor(ring, 16usize);
    let v_desc = descriptor(
        ring + comptime!(t.key_bytes() as u32),
        comptime!(t.cols * ROW),
    );
    let mut m0 = f32::new(LOWEST_MAX);
    let mut m1 = f32::new(LOWEST_MAX);
    let mut l0 = f32::new(0.0);
    let mut l1 = f32::new(0.0);
    let mut o = Vector::<f32, O>::zeroed();
    let mut stage = 0u32;
    let mut phase = 0u32;
    for j in 0..steps {
        let mut ahead = stage + 1;
        if ahead == comptime!(STAGES as u32) {
            ahead = 0u32;
        }
        barrier_wait(full + stage * 8, phase);
        let within = u64::cast_from(stage * comptime!((t.step_bytes() >> 4) as u32));
        let started = product::<S>(
            q_desc,
            k_desc + within,
            t.half,
            t.head_dim,
            comptime!(t.rows() * ROW),
            comptime!(t.cols * ROW),
        );
        if j + 1 < steps {
            copy_step(base, ahead, position, &walk.sources, warp, lane, t);
            position = listed(lists, &walk.list, j + 2, warp, lane, t);
        }
        let s = wait::<S>(started, 0usize, comptime!(t.cols / 2));
        let s = hide::<S>(s, base, stage, lane, t);
        let soft = softmax::<S>(s, m0, m1, l0, l1, log2_scale);
        m0 = soft.m0;
        m1 = soft.m1;
        l0 = soft.l0;
        l1 = soft.l1;
        let p = pack_all::<S, P>(soft.p, t.half);
        let started = weigh::<P, O>(p, v_desc + within, t.half, t.value_dim);
        if j + 1 < steps {
            copies_are_there(full + ahead * 8, lane);
        }
        let x = wait::<O>(started, 0usize, comptime!(t.value_dim / 2));
        o = add_scaled::<O>(o, x, soft.a0, soft.a1, t.value_dim);
        stage = ahead;
        if stage == 0 {
            phase = 1 - phase;
        }
    }

    let before = first_of_heads(&walk, slice.heads as u32, q_strides.len, rows);
    let own = warp * 16 + lane / 4;
    let upper = row_of_head(own, q_strides.len, t);
    let lower = row_of_head(own + ROW_PAIR, q_strides.len, t);
    let shape = comptime!(OutShape {
        value_dim: t.value_dim,
        half: t.half,
        dropout: false,
    });
    let (top0, top1) = (m0 * log2_scale, m1 * log2_scale);
    let (sum0, sum1) = (quad_sum(l0), quad_sum(l1));
    let one = f32::new(1.0);
    store_row::<O>(out, lse, &o, 0usize, top0, sum0, one, before, &upper, shape);
    store_row::<O>(out, lse, &o, 2usize, top1, sum1, one, before, &lower, shape);
}

/// Where a row of the query is in the output, from that of its first head on.
#[cube]
fn row_of_head(row: u32, seq_q: u32, #[comptime] t: WarpgroupTile) -> OutRow {
    OutRow {
        position: row * seq_q,
        exists: is_written(row, comptime!(t.head_rows())),
    }
}

/// Steps up to the last one that has a key. Lists of single keys have none behind the first number that names none.
#[cube]
fn filled_steps(lists: &[i32], list: &QueryList, lane: u32, #[comptime] t: WarpgroupTile) -> u32 {
    let cols = comptime!(t.cols as u32);
    let all = (list.most * comptime!(t.block as u32) + cols - 1) / cols;
    let mut steps = all;
    if comptime!(t.block == 1) {
        steps = 0u32;
        let mut at = 0u32;
        while at < all {
            let j = at + lane;
            let mut has_keys = 0u32;
            if j < all {
                let first = lists[list.first + (j * cols) as usize];
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
fn listed(
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

/// Starts to copy the warp's 16 of the query's rows, which are `stride` pieces apart.
#[cube]
fn copy_heads(
    base: u32,
    first: u64,
    stride: u64,
    warp: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) {
    let piece = lane % PIECES;
    #[unroll]
    for i in 0..comptime!(16 / ROWS_AT_A_TIME) {
        let row = warp * 16 + comptime!((i * ROWS_AT_A_TIME) as u32) + lane / PIECES;
        let target = base + row * comptime!(ROW as u32) + ((piece ^ (row % 8)) * 16);
        let head = head_of_row(row, comptime!(t.head_rows()));
        #[unroll]
        for span in 0..comptime!(t.head_dim / ROW_ELEMENTS) {
            copy_far_piece(
                target + comptime!((span * t.rows() * ROW) as u32),
                first + u64::cast_from(piece * 16) + comptime!((span * ROW) as u64),
                head,
                stride * 16,
            );
        }
    }
}

/// Starts to copy the warp's keys and values of a step, whose positions its lanes have, and says which of them exist.
#[cube]
fn copy_step(
    base: u32,
    stage: u32,
    position: u32,
    sources: &Sources,
    warp: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) {
    let keys = comptime!(t.warp_keys());
    let there = lanes_that_differ(position, comptime!(NOWHERE).runtime()) & comptime!(t.all());
    if lane == 0 {
        shared_store(base + comptime!(t.words()) + stage * 32 + warp * 4, there);
    }
    let piece = lane % PIECES;
    let ring = base + comptime!(t.ring_offset() as u32) + stage * comptime!(t.step_bytes() as u32);
    let source = u64::cast_from(piece * 16);
    #[unroll]
    for i in 0..comptime!(keys / ROWS_AT_A_TIME) {
        let own = comptime!((i * ROWS_AT_A_TIME) as u32) + lane / PIECES;
        let row = warp * comptime!(keys as u32) + own;
        let at = word_of_lane(position, own);
        let target = ring + row * comptime!(ROW as u32) + ((piece ^ (row % 8)) * 16);
        copy_spans(
            target,
            sources.keys + source,
            at,
            sources.key_stride,
            t.head_dim,
            t,
        );
        copy_spans(
            target + comptime!(t.key_bytes() as u32),
            sources.values + source,
            at,
            sources.value_stride,
            t.value_dim,
            t,
        );
    }
    commit_copies();
}

/// Starts to copy a piece of each span of the row at a position.
#[cube]
fn copy_spans(
    target: u32,
    source: u64,
    position: u32,
    stride: u64,
    #[comptime] dim: usize,
    #[comptime] t: WarpgroupTile,
) {
    #[unroll]
    for span in 0..comptime!(dim / ROW_ELEMENTS) {
        let place = target + comptime!((span * t.cols * ROW) as u32);
        let from = source + comptime!((span * ROW) as u64);
        if comptime!(t.far_rows) {
            copy_far_piece(place, from, position, stride * 16);
        } else {
            copy_piece(place, from, position, u32::cast_from(stride) * 16);
        }
    }
}

/// Waits for the warp's copies and says at a barrier that wgmma may read them.
#[cube]
fn copies_are_there(bar: u32, lane: u32) {
    wait_copies();
    async_fence();
    sync_warp();
    if lane == 0 {
        barrier_arrive(bar);
    }
}

/// Gives pairs with keys that do not exist no weight.
#[cube]
fn hide<S: Size>(
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
