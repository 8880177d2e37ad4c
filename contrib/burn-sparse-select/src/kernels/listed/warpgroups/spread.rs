//! Gradients with respect to keys and values for lists of single keys, of many heads, or of adjacent queries that share a list. Same records as
//! [`spread`](crate::kernels::listed::spread), with 64 keys as the rows of a warpgroup. A group of adjacent queries writes one record per key.
//!
//! Warpgroups take turns over the list's keys, 64 at a time, and run independently: the four warps of each copy 16 keys each, and synchronize once per step.
//! All share the queries' rows. Cubes that share a list take turns over its steps.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::listed::gather::{QueryList, Sources};
use crate::kernels::listed::spread::{Chunk, record_of, share_stats, spread_query};
use crate::kernels::listed::tile::ListTensors;
use crate::kernels::listed::views::Input;
use crate::kernels::listed::warpgroups::steps::{
    Listed, RowStrides, copy_heads, copy_keys, listed_at, steps_of,
};
use crate::kernels::listed::warpgroups::tile::{GROUP_ROWS, WarpgroupTile};
use blocksparse_cubecl::arch::sm80::{address, shuffle_word};
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::own_copies;
use blocksparse_cubecl::hopper::rows::{ROW_PAIR, pack_all};
use blocksparse_cubecl::mma::tile::NOWHERE;
use blocksparse_cubecl::shared::addressing::{Four, Slice};

/// Number of keys of a warpgroup's step, and of one of its warps.
pub const KEYS: usize = GROUP_ROWS;
const WARP_KEYS: usize = KEYS / 4;

/// Number of stages of a warpgroup.
const STAGES: usize = 2;

/// Compile-time shape of the mainloop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpreadGroups {
    /// Layout of a step of [`KEYS`] keys, and of the queries. Its rows, the heads of queries, are columns here; rows of dO follow those of queries.
    pub inner: WarpgroupTile,
    /// Number of warpgroups of a cube, each with its own stages.
    pub warpgroups: usize,
}

impl SpreadGroups {
    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.inner.rows()
    }

    /// Returns the number of units of a cube.
    pub fn units(&self) -> usize {
        128 * self.warpgroups
    }

    /// Returns the offset of lse and delta of each head.
    fn stats_offset(&self) -> usize {
        self.inner.ring_offset() + self.warpgroups * STAGES * self.inner.step_bytes()
    }

    /// Returns the bytes of a cube's shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.stats_offset() + self.cols() * 8
    }
}

/// Arguments are as in [`spread`](crate::kernels::listed::spread::spread), with lists as in
/// [`mainloop`](crate::kernels::listed::warpgroups::mainloop::mainloop); `parts` cubes share a list.
#[cube(launch_unchecked)]
pub fn spread<S: Size, P: Size, A: Size, B: Size>(
    q: &[u32],
    k: Input,
    v: Input,
    grad_out: &[u32],
    stats: &[f32],
    tensors: ListTensors,
    bits: &[i32],
    firsts: &[u32],
    records: &mut [Vector<u32, Four>],
    slice: Slice,
    chunk: Chunk,
    scale: f32,
    log2_scale: f32,
    #[comptime] t: SpreadGroups,
) {
    let tile = comptime!(t.inner);
    let (rows, of_q, of_out) = comptime!((tile.cube_rows(), tile.own(), tile.second()));
    let (of_keys, of_values) = comptime!((tile.keys(), tile.values()));
    let groups = comptime!(t.warpgroups as u32);
    let warps = comptime!(4 * t.warpgroups);
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let of = spread_query(&k, &v, &slice, &chunk, &tensors.counts, rows);

    let out_at = base + comptime!(of_q.bytes() as u32);
    let rows_of = u64::cast_from(of.first_row);
    let q_strides = contiguous(chunk.seq_q, tile.head_dim);
    copy_heads(
        base,
        address::<u32>(q) + rows_of * comptime!(tile.head_dim as u64 * 2),
        &q_strides,
        of.queries,
        warp,
        lane,
        warps,
        rows,
        of_q,
    );
    let out_strides = contiguous(chunk.seq_q, tile.value_dim);
    copy_heads(
        out_at,
        address::<u32>(grad_out) + rows_of * comptime!(tile.value_dim as u64 * 2),
        &out_strides,
        of.queries,
        warp,
        lane,
        warps,
        rows,
        of_out,
    );
    let stats_at = base + comptime!(t.stats_offset() as u32);
    share_stats(stats_at, stats, &of, &chunk, rows);

    let steps = steps_of(
        &tensors.keys,
        &of.list,
        lane,
        comptime!(KEYS as u32),
        1u32,
        tile.queries,
    );
    let group = warp / 4;
    let step_bytes = comptime!(tile.step_bytes() as u32);
    let ring =
        base + comptime!(tile.ring_offset() as u32) + group * comptime!(STAGES as u32) * step_bytes;
    let between = chunk.parts * groups;
    let mut j = CUBE_POS_X % chunk.parts * groups + group;
    let mut now = listed_of(&tensors, &of.list, j, warp, lane, t);
    copy_step(ring, now.position, &of.sources, warp, lane, t);
    let mut next = listed_of(&tensors, &of.list, j + between, warp, lane, t);
    own_copies();
    sync_cube();

    let q_desc = descriptor(base, 16usize);
    let q_depth = descriptor(base, comptime!(of_q.span_bytes()));
    let out_desc = descriptor(out_at, 16usize);
    let out_depth = descriptor(out_at, comptime!(of_out.span_bytes()));
    let k_desc = descriptor(ring, 16usize);
    let v_desc = descriptor(ring + comptime!(of_keys.bytes() as u32), 16usize);
    let own_stats = stats_at + lane % 4 * 16;
    let mut stage = 0u32;
    while j < steps {
        own_copies();
        named_sync(1 + group, 128u32);
        let place = record_of(now.position, &of, &chunk, bits, firsts);
        let within = u64::cast_from(stage * (step_bytes >> 4u32));
        let started = product::<S>(
            k_desc + within,
            q_desc,
            comptime!(of_keys.product(of_q, tile.half, tile.head_dim)),
        );
        stage = 1 - stage;
        let mask = now.mask;
        now.position = next.position;
        now.mask = next.mask;
        if j + between < steps {
            let target = ring + stage * step_bytes;
            copy_step(target, now.position, &of.sources, warp, lane, t);
        }
        let behind = listed_of(&tensors, &of.list, j + 2 * between, warp, lane, t);
        next.position = behind.position;
        next.mask = behind.mask;
        let s = wait::<S>(started, 0usize, comptime!(t.cols() / 2));
        let mut p = Vector::<f32, S>::zeroed();
        let upper = shuffle_word(mask, lane / 4);
        let lower = shuffle_word(mask, lane / 4 + comptime!(ROW_PAIR));
        #[unroll]
        for n in 0..comptime!(t.cols() / 8) {
            let stats = shared_load_four(own_stats + comptime!(n as u32 * 64));
            // Aligned groups of eight columns belong to one query.
            let bit = comptime!(1u32 << (8 * n / tile.heads));
            #[unroll]
            for i in 0..4usize {
                let at = comptime!(4 * n + i);
                let log = stats.extract(comptime!(i % 2 * 2));
                let mut weight = exp2(multiply_add(s.extract(at), log2_scale, -log));
                if comptime!(tile.queries > 1) {
                    let own = if comptime!(i < 2) { upper } else { lower };
                    weight = select(own & bit != 0u32, weight, 0f32);
                }
                p.insert(at, weight);
            }
        }
        let left = pack_all::<S, P>(p, tile.half);
        let started = weigh::<P, A>(left, out_depth, tile.half, tile.value_dim);
        let dv = wait::<A>(started, 0usize, comptime!(tile.value_dim / 2));
        let started = product::<S>(
            v_desc + within,
            out_desc,
            comptime!(of_values.product(of_out, tile.half, tile.value_dim)),
        );
        let behind_keys = comptime!(tile.head_dim / 8);
        let one = f32::new(1.0);
        store::<A>(
            records,
            &dv,
            place,
            lane,
            one,
            behind_keys,
            tile.value_dim,
            t,
        );
        let dp = wait::<S>(started, 0usize, comptime!(t.cols() / 2));
        let mut ds = Vector::<f32, S>::zeroed();
        #[unroll]
        for n in 0..comptime!(t.cols() / 8) {
            let stats = shared_load_four(own_stats + comptime!(n as u32 * 64));
            #[unroll]
            for i in 0..4usize {
                let at = comptime!(4 * n + i);
                let delta = stats.extract(comptime!(i % 2 * 2 + 1));
                ds.insert(at, p.extract(at) * (dp.extract(at) - delta));
            }
        }
        let left = pack_all::<S, P>(ds, tile.half);
        let started = weigh::<P, B>(left, q_depth, tile.half, tile.head_dim);
        let dk = wait::<B>(started, 0usize, comptime!(tile.head_dim / 2));
        store::<B>(records, &dk, place, lane, scale, 0usize, tile.head_dim, t);
        j += between;
    }
}

/// Returns the strides of rows of a contiguous tensor.
#[cube]
fn contiguous(seq_q: u32, #[comptime] dim: usize) -> RowStrides {
    let query = comptime!(dim as u64 / 8).runtime();
    RowStrides {
        head: u64::cast_from(seq_q) * query,
        query,
    }
}

/// Returns the lane's key of the warp in step `j`; lanes beyond the keys repeat the first ones.
#[cube]
fn listed_of(
    tensors: &ListTensors,
    list: &QueryList,
    j: u32,
    warp: u32,
    lane: u32,
    #[comptime] t: SpreadGroups,
) -> Listed {
    let of_warp = comptime!(WARP_KEYS as u32);
    let flat = j * comptime!(KEYS as u32) + warp % 4 * of_warp + lane % of_warp;
    listed_at(tensors, list, flat, 1u32, t.inner.queries)
}

/// Starts to copy the warp's keys and values of a step.
#[cube]
fn copy_step(
    step: u32,
    position: u32,
    sources: &Sources,
    warp: u32,
    lane: u32,
    #[comptime] t: SpreadGroups,
) {
    let row = warp % 4 * comptime!(WARP_KEYS as u32);
    let (of_keys, of_values) = comptime!((t.inner.keys(), t.inner.values()));
    copy_keys(
        step, row, position, sources, lane, WARP_KEYS, of_keys, of_values,
    );
}

/// Writes the unit's parts of rows of dK, or of dV after them, to their records. `place` is the record of the lane's key, or [`NOWHERE`].
#[cube]
fn store<O: Size>(
    records: &mut [Vector<u32, Four>],
    acc: &Vector<f32, O>,
    place: u32,
    lane: u32,
    factor: f32,
    #[comptime] before: usize,
    #[comptime] dim: usize,
    #[comptime] t: SpreadGroups,
) {
    #[unroll]
    for i in 0..2usize {
        let own = shuffle_word(place, lane / 4 + comptime!(i as u32 * ROW_PAIR));
        let record = own as usize * comptime!((t.inner.head_dim + t.inner.value_dim) / 8)
            + before
            + (lane % 4) as usize;
        #[unroll]
        for m in 0..comptime!(dim / 32) {
            // A unit has two of every eight elements; four adjacent units transpose, so that each has eight adjacent ones.
            let mut words = Vector::<u32, Four>::zeroed();
            #[unroll]
            for w in 0..4usize {
                let n = comptime!(16 * m + 4 * w + 2 * i);
                let low = acc.extract(n) * factor;
                let high = acc.extract(comptime!(n + 1)) * factor;
                words.insert(w, pack(low, high, t.inner.half));
            }
            let words = trade_four(words, lane);
            if own != comptime!(NOWHERE) {
                records[record + comptime!(4 * m)] = words;
            }
        }
    }
}
