//! Steps of a query's mainloop: their keys and values, which all warps copy a step ahead, and masks of the existing ones.

// Compile-time conditions stay separate from runtime ones; kernels have no `div_ceil` and no `is_multiple_of`.
#![allow(
    clippy::collapsible_if,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of
)]

use cubecl::prelude::*;

use crate::kernels::listed::gather::{
    ListMainloop, QueryList, Sources, list_mainloop_of, position_of_key,
};
use crate::kernels::listed::tile::{
    CubeRows, ListTensors, Lists, head_of_row, queries_from, query_of_row,
};
use crate::kernels::listed::views::Input;
use crate::kernels::listed::warpgroups::tile::{QUERY_WORDS, STAGES, WarpgroupTile};
use blocksparse_cubecl::arch::sm80::{lanes_that_differ, shuffle_word};
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::{ROWS_AT_A_TIME, Spans, copy_row, lane_row};
use blocksparse_cubecl::mma::tile::{NOWHERE, ROW_PAIR};
use blocksparse_cubecl::shared::addressing::{Slice, batch_of, head_of};

/// A key that a lane copies.
#[derive(CubeType, Clone, Copy)]
pub struct Listed {
    /// Its position, or [`NOWHERE`].
    pub position: u32,
    /// Bit mask of the cube's queries that listed it, if there are several.
    pub mask: u32,
}

/// Initial state of a cube.
#[derive(CubeType, Clone, Copy)]
pub struct Begun {
    pub mainloop: ListMainloop,
    /// Number of its existing queries.
    pub queries: u32,
    pub steps: u32,
    /// The lane's key of the first step.
    pub key: Listed,
}

/// Initializes the barriers of the cube's stages, and looks up its list.
#[cube]
pub fn begin(
    base: u32,
    k: &Input,
    v: &Input,
    tensors: &ListTensors,
    seq_q: u32,
    slice: &Slice,
    lists: &Lists,
    warp: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) -> Begun {
    init_barriers(base + comptime!(t.full()), t);
    let rows = comptime!(t.cube_rows());
    let query = (lists.first + CUBE_POS_X) * comptime!(t.queries as u32);
    let of_head = (batch_of(slice) * slice.heads + head_of(slice)) as u32 * lists.count;
    let list = of_head + CUBE_POS_X;
    let mut most = lists.most;
    if comptime!(t.queries > 1) {
        most = tensors.counts[list as usize];
    }
    let own = QueryList {
        first: (list * lists.most) as usize,
        most,
        len: k.strides.len,
    };
    let mainloop = list_mainloop_of(query, own, k, v, slice, t.heads);
    let (cols, block) = comptime!((t.cols as u32, t.block as u32));
    let steps = steps_of(&tensors.keys, &mainloop.list, lane, cols, block, t.queries);
    let key = listed(tensors, &mainloop.list, 0u32, warp, lane, t);
    Begun {
        mainloop,
        queries: queries_from(query, seq_q, rows),
        steps,
        key,
    }
}

/// Initializes the barriers of a cube's stages.
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

/// Returns the stage of the next step.
#[cube]
pub fn next_stage(stage: u32) -> u32 {
    let mut next = stage + 1;
    if next == comptime!(STAGES as u32) {
        next = 0u32;
    }
    next
}

/// Returns the number of steps of a list: for groups as many as its entries fill, otherwise see [`filled_steps`].
#[cube]
pub fn steps_of(
    lists: &[i32],
    list: &QueryList,
    lane: u32,
    #[comptime] cols: u32,
    #[comptime] block: u32,
    #[comptime] queries: usize,
) -> u32 {
    if comptime!(queries > 1) {
        uniform((list.most * block + comptime!(cols - 1)) / cols)
    } else {
        filled_steps(lists, list, lane, cols, block)
    }
}

/// Returns the number of steps of `keys` keys up to the last one with a key. Lists of single keys have no entries after the first empty one. For lists of
/// blocks all steps count.
#[cube]
fn filled_steps(
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

/// Returns the lane's key of the warp in step `j`.
#[cube]
pub fn listed(
    tensors: &ListTensors,
    list: &QueryList,
    j: u32,
    warp: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) -> Listed {
    let of_warp = comptime!(t.warp_keys() as u32);
    let flat = j * comptime!(t.cols as u32) + warp * of_warp + lane % of_warp;
    listed_at(tensors, list, flat, comptime!(t.block as u32), t.queries)
}

/// Returns the key at an index of a list of blocks of `block` keys, which `queries` queries share.
#[cube]
pub fn listed_at(
    tensors: &ListTensors,
    list: &QueryList,
    flat: u32,
    #[comptime] block: u32,
    #[comptime] queries: usize,
) -> Listed {
    let position = position_of_key(&tensors.keys, list, flat, block);
    let mut mask = 0u32.runtime();
    if comptime!(queries > 1) {
        if position != comptime!(NOWHERE) {
            mask = tensors.masks[list.first + (flat / block) as usize];
        }
    }
    Listed { position, mask }
}

/// Starts to copy the warp's keys and values of a step, one per lane, and stores a mask of the existing ones for each query.
#[cube]
pub fn copy_step(
    base: u32,
    stage: u32,
    key: &Listed,
    sources: &Sources,
    warp: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) {
    let words = base + comptime!(t.words()) + stage * comptime!(t.step_words() as u32) + warp * 4;
    if comptime!(t.queries == 1) {
        let there =
            lanes_that_differ(key.position, comptime!(NOWHERE).runtime()) & comptime!(t.all());
        if lane == 0 {
            shared_store(words, there);
        }
    } else {
        let mut own = 0u32.runtime();
        #[unroll]
        for query in 0..comptime!(t.queries as u32) {
            let bit = key.mask & comptime!(1u32 << query);
            let there = lanes_that_differ(bit, 0u32.runtime()) & comptime!(t.all());
            own = select(lane == query, there, own);
        }
        if lane < comptime!(t.queries as u32) {
            shared_store(words + lane * comptime!(QUERY_WORDS as u32), own);
        }
    }
    let step = base + comptime!(t.ring_offset() as u32) + stage * comptime!(t.step_bytes() as u32);
    let row = warp * comptime!(t.warp_keys() as u32);
    copy_keys(
        step,
        row,
        key.position,
        sources,
        lane,
        comptime!(t.warp_keys()),
        comptime!(t.keys()),
        comptime!(t.values()),
    );
}

/// Starts to copy `keys` of a step's keys and values from `row` on. Consecutive lanes hold their positions.
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
        let at = shuffle_word(position, own);
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

/// Strides of rows of heads and of queries, in pieces of 16 bytes.
#[derive(CubeType, Clone, Copy)]
pub struct RowStrides {
    pub head: u64,
    pub query: u64,
}

/// Starts to copy the rows of a cube's existing queries, distributed over `warps` warps.
#[cube]
pub fn copy_heads(
    matrix: u32,
    first: u64,
    strides: &RowStrides,
    queries: u32,
    warp: u32,
    lane: u32,
    #[comptime] warps: usize,
    #[comptime] rows: CubeRows,
    #[comptime] of: Spans,
) {
    let mut four = warp;
    while four < comptime!((of.rows / ROWS_AT_A_TIME) as u32) {
        let row = four * comptime!(ROWS_AT_A_TIME as u32) + lane_row(lane);
        let mut from = first;
        if comptime!(rows.queries > 1) {
            from += u64::cast_from(query_of_row(row, queries, rows)) * strides.query * 16;
        }
        let head = head_of_row(row, rows);
        copy_row(matrix, row, from, head, strides.head, lane, of);
        four += comptime!(warps as u32);
    }
}

/// Masks the unit's pairs whose query did not list the key. Aligned groups of eight rows belong to one query.
#[cube]
pub fn hide_missing<S: Size>(
    s_in: Vector<f32, S>,
    base: u32,
    stage: u32,
    warp: u32,
    queries: u32,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) -> Vector<f32, S> {
    let mut s = s_in;
    let words = base + comptime!(t.words()) + stage * comptime!(t.step_words() as u32);
    let rows = comptime!(t.cube_rows());
    // All rows of a warp belong to one query, or its upper and its lower half do.
    let kinds = comptime!(if t.queries > 1 && t.heads % 16 != 0 {
        2
    } else {
        1
    });
    let mut there = Array::<u32>::new(comptime!(kinds * t.warps()));
    let mut all = u32::MAX.runtime();
    #[unroll]
    for kind in 0..kinds {
        let row = warp * 16 + comptime!(kind as u32 * ROW_PAIR);
        let query = query_of_row(row, queries, rows);
        let words = words + query * comptime!(QUERY_WORDS as u32);
        #[unroll]
        for four in 0..comptime!(t.warpgroups) {
            let read = shared_load_words(words + comptime!((16 * four) as u32));
            #[unroll]
            for i in 0..4usize {
                let word = read.extract(i);
                there[comptime!(kind * t.warps() + 4 * four + i)] = word;
                all &= word;
            }
        }
    }
    if uniform(all) != comptime!(t.all()) {
        // Shifts the masks to the unit's first column.
        #[unroll]
        for word in 0..comptime!(kinds * t.warps()) {
            let own = there[word] >> (lane % 4 * 2);
            there[word] = own;
        }
        let infinity = f32::new(f32::NEG_INFINITY);
        #[unroll]
        for eight in 0..comptime!(t.cols / 8) {
            let (word, shift) = comptime!((8 * eight / t.warp_keys(), 8 * eight % t.warp_keys()));
            let upper = there[word];
            let lower = there[comptime!((kinds - 1) * t.warps() + word)];
            #[unroll]
            for i in 0..2usize {
                let exists = upper & comptime!(1u32 << (shift + i)) != 0u32;
                let at = comptime!(4 * eight + i);
                s.insert(at, select(exists, s.extract(at), infinity));
                let exists = lower & comptime!(1u32 << (shift + i)) != 0u32;
                let at = comptime!(at + 2);
                s.insert(at, select(exists, s.extract(at), infinity));
            }
        }
    }
    s
}
