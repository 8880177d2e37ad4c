//! Gradients with respect to keys and values for lists of single keys, query by query. The contribution of a query's heads to a key is a record, which is
//! written next to the other records of that key. [`gather`](crate::kernels::listed::records::gather) adds them in the order of queries.
//!
//! ```text
//! sᵀ = K · qᵀ    p = exp2(s − lse)    dv = pᵀ · dO    dpᵀ = V · dOᵀ    ds = p ∘ (dp − delta)    dk = dsᵀ · q
//! ```
//!
//! This is the mainloop of a query, with keys as rows and heads as columns, so the matmuls sum over heads. Keys are read once for all heads, as in the mainloop
//! for dQ. Each pair of a query and a key has one record: a row of dK and one of dV, in the inputs' type. Pairs that are not listed cost nothing, whatever the
//! selection.
//!
//! A warp has 16 keys at a time, which it loads and multiplies independently: warps of a cube share only the query's rows, and synchronize once.

// Kernels have no `div_ceil`.
#![allow(clippy::manual_div_ceil)]

use cubecl::prelude::*;

use crate::kernels::listed::gather::{
    QueryList, Sources, copy_of_lanes, copy_own, position_of_key, sources_of,
};
use crate::kernels::listed::keys::{by_scores, weigh};
use crate::kernels::listed::tile::{CubeRows, place_of_row, queries_from};
use crate::kernels::listed::views::Input;
use blocksparse_cubecl::arch::sm80::*;
use blocksparse_cubecl::mma::product::*;
use blocksparse_cubecl::mma::tile::{NOWHERE, ROW_PAIR, Tile};
use blocksparse_cubecl::shared::addressing::{Four, Slice, batch_of, head_of};

/// Number of keys of a warp's step.
pub const KEYS: usize = 16;

/// Compile-time shape of the mainloop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpreadTile {
    /// Widths, columns (padded heads) and stages of a warp. Of the fields only sizes and `far_rows` are used.
    pub inner: Tile,
    /// Number of heads that share a list.
    pub heads: usize,
}

impl SpreadTile {
    fn stats_bytes(&self) -> usize {
        self.inner.cols * 8
    }

    /// Returns the offset of the query's rows of width head_dim.
    fn q_offset(&self) -> usize {
        self.stats_bytes()
    }

    /// Returns the offset of the query's rows of width value_dim.
    fn out_offset(&self) -> usize {
        self.q_offset() + self.inner.cols * self.inner.pitch(self.inner.head_dim)
    }

    fn rings_offset(&self) -> usize {
        self.out_offset() + self.inner.cols * self.inner.pitch(self.inner.value_dim)
    }

    fn key_bytes(&self) -> usize {
        KEYS * self.inner.pitch(self.inner.head_dim)
    }

    /// Returns the bytes of a stage: positions, keys and values.
    fn stage_bytes(&self) -> usize {
        KEYS * 4 + self.key_bytes() + KEYS * self.inner.pitch(self.inner.value_dim)
    }

    /// Returns the bytes of a cube's shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.rings_offset() + self.inner.warps * self.inner.stages * self.stage_bytes()
    }

    /// Returns the number of pieces of 16 bytes of a record.
    pub fn pieces(&self) -> usize {
        (self.inner.head_dim + self.inner.value_dim) / 8
    }
}

/// Lists of a launch, and the places of their records.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Chunk {
    /// Index of the first list.
    pub first: u32,
    /// Number of lists per KV head.
    pub count: u32,
    /// Query of the first list.
    pub query: u32,
    /// Number of cubes that share a list.
    pub parts: u32,
    /// Number of words of a key's bits that cover these lists.
    pub words: u32,
    /// Index of the first of these words, and number of all words.
    pub first_word: u32,
    pub all_words: u32,
    /// Maximum number of records of a KV head.
    pub room: u32,
    /// Number of queries of the call.
    pub seq_q: u32,
    /// Number of entries of a list.
    pub most: u32,
}

/// Queries of a cube: one, or a group of adjacent ones.
#[derive(CubeType, Clone, Copy)]
pub struct SpreadQuery {
    /// Index of their list in the launch.
    own: u32,
    /// Index of their KV head over all batch entries.
    list_index: u32,
    /// Row of the first query in the first head that shares the list, over all batch entries and heads.
    pub first_row: u32,
    /// Number of queries.
    pub queries: u32,
    pub list: QueryList,
    pub sources: Sources,
}

/// Returns the queries of the cube.
#[cube]
pub fn spread_query(
    k: &Input,
    v: &Input,
    slice: &Slice,
    chunk: &Chunk,
    counts: &[u32],
    #[comptime] rows: CubeRows,
) -> SpreadQuery {
    let kv_head = head_of(slice) as u32;
    let batch = batch_of(slice) as u32;
    let list_index = batch * slice.heads as u32 + kv_head;
    let own = CUBE_POS_X / chunk.parts;
    let query = chunk.query + own * comptime!(rows.queries as u32);
    let list = list_index * chunk.count + chunk.first + own;
    let mut most = chunk.most;
    if comptime!(rows.queries > 1) {
        most = counts[list as usize];
    }
    SpreadQuery {
        own,
        list_index,
        first_row: list_index * comptime!(rows.heads as u32) * chunk.seq_q + query,
        queries: queries_from(query, chunk.seq_q, rows),
        list: QueryList {
            first: (list * chunk.most) as usize,
            most,
            len: k.strides.len,
        },
        sources: sources_of(k, v, batch, kv_head),
    }
}

/// Writes lse and delta of each query and head to shared memory at `target`.
#[cube]
pub fn share_stats(
    target: u32,
    stats: &[f32],
    of: &SpreadQuery,
    chunk: &Chunk,
    #[comptime] rows: CubeRows,
) {
    let mut column = UNIT_POS_X;
    while column < comptime!(rows.rows as u32) {
        // Padding columns have weight 0.
        let mut lse = f32::new(1e30);
        let mut delta = f32::new(0.0);
        if column < of.queries * comptime!(rows.heads as u32) {
            let row = of.first_row + place_of_row(column, chunk.seq_q, of.queries, rows);
            let at = row as usize * 2;
            lse = stats[at];
            delta = stats[at + 1];
        }
        shared_store_two(target + column * 8, lse, delta);
        column += CUBE_DIM_X;
    }
}

/// Returns the index of the queries' record for a key, or [`NOWHERE`] if there is none.
#[cube]
pub fn record_of(key: u32, of: &SpreadQuery, chunk: &Chunk, bits: &[i32], firsts: &[u32]) -> u32 {
    let exists = key != comptime!(NOWHERE);
    let row = (of.list_index * of.list.len + select(exists, key, 0u32)) as usize;
    let words = chunk.words as usize;
    let word = (of.own / 32) as usize;
    let before = (1u32 << (of.own % 32)) - 1u32;
    let its = bits[row * chunk.all_words as usize + chunk.first_word as usize + word] as u32;
    let place = firsts[row * (words + 1) + word] + (its & before).count_ones();
    let place = of.list_index * chunk.room + place;
    select(exists, place, comptime!(NOWHERE).runtime())
}

/// Writes the records of each query. `q` `[batch, heads, seq_q, head_dim]` and `grad_out` are contiguous words; `k` and `v` may have any strides of 16 bytes in
/// their outer dimensions; `stats` and `lists` are as in [`mainloop`](crate::kernels::listed::mainloop::mainloop). `bits` and `firsts` come from
/// [`pair_places`](blocksparse_cubecl::on_device::pair_places) for the launch's queries, which have a cube each: `parts` is 1. `records` are
/// `[lists, room, pieces]`.
#[cube(launch_unchecked)]
pub fn spread(
    q: &[u32],
    k: Input,
    v: Input,
    grad_out: &[u32],
    stats: &[f32],
    lists: &[i32],
    bits: &[i32],
    firsts: &[u32],
    records: &mut [Vector<u32, Four>],
    slice: Slice,
    chunk: Chunk,
    scale: f32,
    log2_scale: f32,
    #[comptime] t: SpreadTile,
) {
    let tile = comptime!(t.inner);
    let stages = comptime!(tile.stages as u32);
    let rows = comptime!(CubeRows::of_query(t.heads, tile.cols));
    let warps = comptime!(tile.warps as u32);
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 128usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let of = spread_query(&k, &v, &slice, &chunk, firsts, rows);

    let q_at = base + comptime!(t.q_offset() as u32);
    let out_at = base + comptime!(t.out_offset() as u32);
    let (q, grad_out) = (address::<u32>(q), address::<u32>(grad_out));
    copy_heads(q_at, q, &of, chunk.seq_q, tile.head_dim, rows, tile);
    copy_heads(
        out_at,
        grad_out,
        &of,
        chunk.seq_q,
        tile.value_dim,
        rows,
        tile,
    );
    commit_copies();
    share_stats(base, stats, &of, &chunk, rows);

    let stage_bytes = comptime!(t.stage_bytes() as u32);
    let ring = base
        + comptime!(t.rings_offset() as u32)
        + warp * comptime!(tile.stages as u32) * stage_bytes;
    #[unroll]
    for step in 0..comptime!(stages - 1) {
        let position = position_of(lists, &of.list, warp + step * warps, lane);
        copy_step(ring + step * stage_bytes, position, lane, &of.sources, t);
    }
    let mut position = position_of(lists, &of.list, warp + comptime!(stages - 1) * warps, lane);
    // The copies of the query's rows are the oldest.
    wait_copies_but(comptime!(tile.stages - 1));
    sync_cube();

    let q_cols = q_at + lane_cols(lane, comptime!(tile.head_dim), tile);
    let q_depth = q_at + lane_depth(lane, comptime!(tile.head_dim), tile);
    let out_cols = out_at + lane_cols(lane, comptime!(tile.value_dim), tile);
    let out_depth = out_at + lane_depth(lane, comptime!(tile.value_dim), tile);
    let stats_at = base + lane % 4 * 16;
    let k_rows = lane_rows(lane, comptime!(tile.head_dim), tile) + comptime!(KEYS as u32 * 4);
    let v_rows = lane_rows(lane, comptime!(tile.value_dim), tile)
        + comptime!(KEYS as u32 * 4 + t.key_bytes() as u32);
    let none = Array::<Vector<u32, Four>>::new(1usize);

    let all = (chunk.most + comptime!(KEYS as u32 - 1)) / comptime!(KEYS as u32);
    let mut group = warp;
    let mut stage = 0u32;
    let mut next = comptime!(stages - 1).runtime();
    while group < all {
        wait_copies_but(comptime!(tile.stages - 2));
        sync_plane();
        copy_step(ring + next * stage_bytes, position, lane, &of.sources, t);
        position = position_of(lists, &of.list, group + stages * warps, lane);
        let at = ring + stage * stage_bytes;
        let key = shared_load(at + lane % comptime!(KEYS as u32) * 4);
        if ballot(key != comptime!(NOWHERE)) != 0u32 {
            let place = record_of(key, &of, &chunk, bits, firsts);

            let mut s = product(
                at + k_rows,
                &none,
                q_cols,
                false,
                comptime!(tile.head_dim),
                tile,
            );
            weigh(&mut s, stats_at, log2_scale, tile);
            let p = pack_left(&s, tile);
            let mut dv = Array::<Vector<f32, Four>>::new(comptime!(tile.value_dim / 8));
            #[unroll]
            for i in 0..comptime!(tile.value_dim / 8) {
                dv[i] = Vector::<f32, Four>::zeroed();
            }
            accumulate(&p, out_depth, &mut dv, comptime!(tile.value_dim), tile);
            store(records, &dv, place, lane, f32::new(1.0), true, t);

            let mut dp = product(
                at + v_rows,
                &none,
                out_cols,
                false,
                comptime!(tile.value_dim),
                tile,
            );
            by_scores(&s, &mut dp, stats_at, tile);
            let ds = pack_left(&dp, tile);
            let mut dk = Array::<Vector<f32, Four>>::new(comptime!(tile.head_dim / 8));
            #[unroll]
            for i in 0..comptime!(tile.head_dim / 8) {
                dk[i] = Vector::<f32, Four>::zeroed();
            }
            accumulate(&ds, q_depth, &mut dk, comptime!(tile.head_dim), tile);
            store(records, &dk, place, lane, scale, false, t);
        }
        next = stage;
        stage += 1u32;
        if stage == stages {
            stage = 0u32;
        }
        group += warps;
    }
}

/// Returns the position of the lane's key of a group, or [`NOWHERE`]; lanes beyond the keys repeat the first ones.
#[cube]
fn position_of(lists: &[i32], list: &QueryList, group: u32, lane: u32) -> u32 {
    let flat = group * comptime!(KEYS as u32) + lane % comptime!(KEYS as u32);
    position_of_key(lists, list, flat, 1u32)
}

/// Starts to copy a step's keys and values, and stores their positions. Commits a cp.async group.
#[cube]
fn copy_step(target: u32, position: u32, lane: u32, sources: &Sources, #[comptime] t: SpreadTile) {
    if lane < comptime!(KEYS as u32) {
        shared_store(target + lane * 4, position);
    }
    if ballot(position != comptime!(NOWHERE)) != 0u32 {
        copy_of_lanes(
            target + comptime!(KEYS as u32 * 4),
            sources.keys,
            sources.key_stride,
            position,
            lane,
            comptime!(t.inner.head_dim),
            KEYS,
            32usize,
            comptime!(t.inner),
        );
        copy_of_lanes(
            target + comptime!(KEYS as u32 * 4 + t.key_bytes() as u32),
            sources.values,
            sources.value_stride,
            position,
            lane,
            comptime!(t.inner.value_dim),
            KEYS,
            32usize,
            comptime!(t.inner),
        );
    }
    commit_copies();
}

/// Starts to copy the query's row of every head of a contiguous tensor.
#[cube]
fn copy_heads(
    target: u32,
    tensor: u64,
    of: &SpreadQuery,
    seq_q: u32,
    #[comptime] dim: usize,
    #[comptime] rows: CubeRows,
    #[comptime] t: Tile,
) {
    let pieces = comptime!(dim as u64 / 8);
    let first = tensor + u64::cast_from(of.first_row) * pieces * 16;
    copy_own(target, first, u64::cast_from(seq_q) * pieces, dim, rows, t);
}

/// Writes a warp's rows of dK, or of dV after them, to their records. `place` is the record of the lane's key, or [`NOWHERE`].
#[cube]
fn store(
    records: &mut [Vector<u32, Four>],
    acc: &Array<Vector<f32, Four>>,
    place: u32,
    lane: u32,
    factor: f32,
    #[comptime] values: bool,
    #[comptime] t: SpreadTile,
) {
    let tile = comptime!(t.inner);
    let dim = comptime!(if values {
        tile.value_dim
    } else {
        tile.head_dim
    });
    let before = comptime!(if values { tile.head_dim / 8 } else { 0 });
    let eights = comptime!(dim / 8);
    let half = comptime!(tile.element.half());
    #[unroll]
    for i in 0..2usize {
        let own = shuffle_word(place, lane / 4 + comptime!(i as u32 * ROW_PAIR));
        let record = own as usize * comptime!(t.pieces()) + comptime!(before);
        #[unroll]
        for m in 0..comptime!(eights.div_ceil(4)) {
            // A unit has two of every eight elements; four adjacent units transpose, so that each has eight adjacent ones.
            let mut words = Vector::<u32, Four>::zeroed();
            #[unroll]
            for w in 0..4usize {
                if comptime!(4 * m + w < eights) {
                    let four = acc[comptime!(4 * m + w)];
                    let low = four.extract(comptime!(2 * i)) * factor;
                    let high = four.extract(comptime!(2 * i + 1)) * factor;
                    words.insert(w, pack(low, high, half));
                }
            }
            let words = trade_four(words, lane);
            let eight = comptime!(4 * m as u32) + lane % 4;
            if own != comptime!(NOWHERE) && eight < comptime!(eights as u32) {
                records[record + eight as usize] = words;
            }
        }
    }
}
