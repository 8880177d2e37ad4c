//! Loads of a mainloop: the rows of its query, and the keys and values of its list, a few steps ahead.

// Compile-time conditions stay separate from runtime ones; kernels have no `div_ceil`.
#![allow(clippy::collapsible_if, clippy::manual_div_ceil)]

use cubecl::prelude::*;

use crate::kernels::listed::tile::{CubeRows, MainloopTile, head_of_row};
use crate::kernels::listed::views::{Input, first_row};
use blocksparse_cubecl::arch::sm80::*;
use blocksparse_cubecl::mma::tile::{NOWHERE, Tile};
use blocksparse_cubecl::shared::addressing::{Four, Slice, batch_of, head_of};

/// The list of a query.
#[derive(CubeType, Clone, Copy)]
pub struct QueryList {
    /// Index of its first entry.
    pub first: usize,
    /// Number of entries.
    pub most: u32,
    /// Number of keys of the sequence.
    pub len: u32,
}

/// Addresses of the keys and values of a head.
#[derive(CubeType, Clone, Copy)]
pub struct Sources {
    /// Addresses of the first key and the first value.
    pub keys: u64,
    pub values: u64,
    /// Pieces of 16 bytes from one position to the next.
    pub key_stride: u64,
    pub value_stride: u64,
}

/// State of a cube's mainloop.
#[derive(CubeType, Clone, Copy)]
pub struct ListMainloop {
    batch: u32,
    /// Its query, and the first of the heads that share the list.
    query: u32,
    first_head: u32,
    pub list: QueryList,
    pub sources: Sources,
}

/// Returns the mainloop of the cube's query.
#[cube]
pub fn list_mainloop(
    seq_q: u32,
    k: &Input,
    v: &Input,
    slice: &Slice,
    most: u32,
    #[comptime] t: CubeRows,
) -> ListMainloop {
    let query = CUBE_POS_X;
    let of_head = head_of(slice) as u32 + batch_of(slice) as u32 * slice.heads as u32;
    let list = QueryList {
        first: ((of_head * seq_q + query) * most) as usize,
        most,
        len: k.strides.len,
    };
    list_mainloop_of(query, list, k, v, slice, t.heads)
}

/// Returns the mainloop of a query over a list.
#[cube]
pub fn list_mainloop_of(
    query: u32,
    list: QueryList,
    k: &Input,
    v: &Input,
    slice: &Slice,
    #[comptime] heads: usize,
) -> ListMainloop {
    let kv_head = head_of(slice) as u32;
    let batch = batch_of(slice) as u32;
    ListMainloop {
        batch,
        query,
        first_head: kv_head * comptime!(heads as u32),
        list,
        sources: sources_of(k, v, batch, kv_head),
    }
}

/// Returns the sources of a head.
#[cube]
pub fn sources_of(k: &Input, v: &Input, batch: u32, kv_head: u32) -> Sources {
    Sources {
        keys: first_row(k, batch, kv_head),
        values: first_row(v, batch, kv_head),
        key_stride: k.strides.row,
        value_stride: v.strides.row,
    }
}

/// Returns the row of the query in the first head that shares the list, over all batch entries and heads.
#[cube]
pub fn first_of_heads(
    mainloop: &ListMainloop,
    lists: u32,
    seq_q: u32,
    #[comptime] heads: usize,
) -> u32 {
    (mainloop.batch * lists * comptime!(heads as u32) + mainloop.first_head) * seq_q
        + mainloop.query
}

/// Starts to copy the query's rows of a tensor.
#[cube]
pub fn copy_query(
    target: u32,
    tensor: &Input,
    mainloop: &ListMainloop,
    #[comptime] dim: usize,
    #[comptime] t: MainloopTile,
) {
    let first = rows_of_query(tensor, mainloop);
    let (rows, tile) = comptime!((t.cube_rows(), t.inner));
    copy_own(target, first, tensor.strides.head, dim, rows, tile);
}

/// Returns the address of the query's row in the first head that shares the list.
#[cube]
pub fn rows_of_query(tensor: &Input, mainloop: &ListMainloop) -> u64 {
    let first = first_row(tensor, mainloop.batch, mainloop.first_head);
    first + u64::cast_from(mainloop.query) * tensor.strides.row * 16
}

/// Starts to copy as many steps as fit the ring, less one. Returns the positions of the step after them.
#[cube]
pub fn fill_ring(
    base: u32,
    lists: &[i32],
    mainloop: &ListMainloop,
    #[comptime] t: MainloopTile,
) -> u32 {
    let ahead = comptime!(t.inner.stages as u32 - 1);
    #[unroll]
    for j in 0..ahead {
        let position = listed_position(lists, &mainloop.list, j, t);
        copy_listed(base, j, position, &mainloop.sources, t);
    }
    listed_position(lists, &mainloop.list, ahead.runtime(), t)
}

/// Returns the number of steps of a list.
#[cube]
pub fn steps_of(list: &QueryList, #[comptime] t: MainloopTile) -> u32 {
    let cols = comptime!(t.inner.cols as u32);
    (list.most * comptime!(t.block as u32) + cols - 1) / cols
}

/// Returns the position of the lane's key of step `j`, or [`NOWHERE`]. It is the same in all warps.
#[cube]
pub fn listed_position(
    lists: &[i32],
    list: &QueryList,
    j: u32,
    #[comptime] t: MainloopTile,
) -> u32 {
    let flat = j * comptime!(t.inner.cols as u32) + UNIT_POS_X % comptime!(t.inner.cols as u32);
    position_of_key(lists, list, flat, comptime!(t.block as u32))
}

/// Returns the position of a key of a list whose entries stand for `block` adjacent keys each, or [`NOWHERE`].
#[cube]
pub fn position_of_key(lists: &[i32], list: &QueryList, flat: u32, #[comptime] block: u32) -> u32 {
    let entry = flat / block;
    let mut position = comptime!(NOWHERE).runtime();
    if entry < list.most {
        let named = lists[list.first + entry as usize];
        let at = named as u32 * block + flat % block;
        if named >= 0i32 && at < list.len {
            position = at;
        }
    }
    position
}

/// Starts to copy the keys and values at the lanes' positions to a stage, and stores a bit mask of those that exist. Commits a cp.async group.
#[cube]
pub fn copy_listed(
    base: u32,
    stage: u32,
    position: u32,
    sources: &Sources,
    #[comptime] t: MainloopTile,
) {
    let there = lanes_that_differ(position, comptime!(NOWHERE).runtime());
    if UNIT_POS_X == 0 {
        shared_store(base + stage * 4, there);
    }
    if there != 0u32 {
        let target =
            base + comptime!(t.ring_offset() as u32) + stage * comptime!(t.step_bytes() as u32);
        copy_of_lanes(
            target,
            sources.keys,
            sources.key_stride,
            position,
            UNIT_POS_X,
            comptime!(t.inner.head_dim),
            comptime!(t.inner.cols),
            comptime!(t.inner.units()),
            comptime!(t.inner),
        );
        copy_of_lanes(
            target + comptime!(t.inner.b1_bytes() as u32),
            sources.values,
            sources.value_stride,
            position,
            UNIT_POS_X,
            comptime!(t.inner.value_dim),
            comptime!(t.inner.cols),
            comptime!(t.inner.units()),
            comptime!(t.inner),
        );
    }
    commit_copies();
}

/// Starts to copy `rows` rows of a head by `units` units. Row `r` is at the position of lane `r`.
#[cube]
pub fn copy_of_lanes(
    target: u32,
    head: u64,
    stride: u64,
    position: u32,
    unit: u32,
    #[comptime] dim: usize,
    #[comptime] rows: usize,
    #[comptime] units: usize,
    #[comptime] t: Tile,
) {
    let pieces = comptime!(t.words(dim) / 4);
    let total = comptime!(rows * pieces);
    // After this many copies of all units the same pieces repeat in later rows.
    let period = comptime!(period_of(pieces, units));
    #[unroll]
    for i in 0..comptime!(total.div_ceil(units)) {
        let index = unit + comptime!((i % period * units) as u32);
        let row = index / comptime!(pieces as u32)
            + comptime!((i / period * (period * units / pieces)) as u32);
        let piece = index % comptime!(pieces as u32) * 16;
        let at = shuffle_word(position, row);
        let place = target + row * comptime!(t.pitch(dim) as u32) + piece;
        let source = head + u64::cast_from(piece);
        if comptime!(total % units == 0) {
            copy_of_row(place, source, at, stride, t.far_rows);
        } else {
            if row < comptime!(rows as u32) {
                copy_of_row(place, source, at, stride, t.far_rows);
            }
        }
    }
}

/// Returns the number of copies of all units after which pieces repeat.
fn period_of(pieces: usize, units: usize) -> usize {
    let (mut a, mut b) = (pieces, units);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    pieces / a
}

/// Starts to copy the rows of a query, which are `stride` pieces of 16 bytes apart.
#[cube]
pub fn copy_own(
    target: u32,
    first: u64,
    stride: u64,
    #[comptime] dim: usize,
    #[comptime] rows: CubeRows,
    #[comptime] t: Tile,
) {
    let pieces = comptime!(t.words(dim) as u32 / 4);
    let mut index = UNIT_POS_X;
    while index < comptime!(rows.rows as u32) * pieces {
        let row = index / pieces;
        let piece = index % pieces * 16;
        copy_far_piece(
            target + row * comptime!(t.pitch(dim) as u32) + piece,
            first + u64::cast_from(piece),
            head_of_row(row, rows),
            stride * 16,
        );
        index += comptime!(t.units() as u32);
    }
}

/// Mask of a stage in which all keys exist. With fewer keys than lanes, the other lanes repeat them.
pub const ALL: u32 = u32::MAX;

/// Sets the unit's logits of missing keys to `score`.
#[cube]
pub fn hide(
    s: &mut Array<Vector<f32, Four>>,
    there: u32,
    quad: u32,
    score: f32,
    #[comptime] t: MainloopTile,
) {
    let eights = comptime!(t.inner.eights());
    let own = there >> quad;
    #[unroll]
    for n in 0..eights {
        #[unroll]
        for i in 0..4usize {
            let exists = (own >> comptime!((8 * n + i % 2) as u32)) & 1u32 != 0u32;
            #[unroll]
            for m in 0..comptime!(t.inner.warp_tiles) {
                let at = comptime!(m * eights + n);
                let mut four = s[at];
                four.insert(i, select(exists, four.extract(i), score));
                s[at] = four;
            }
        }
    }
}
