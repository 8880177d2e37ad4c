//! The forward kernel of many heads: a cube has one query, with 64 of the heads that share its list to a warpgroup, and walks its list.
//!
//! ```text
//! every warpgroup, per step j of the list:
//!     wait until all warps' copies of K(j), V(j) are there    mbarrier
//!     start s = q · K(j)ᵀ                                     wgmma
//!     start this warp's rows of K(j + 1), V(j + 1)            cp.async
//!     p = exp2(s − m')                                        registers
//!     start x = p · V(j)                                      wgmma, p in registers
//!     say that this warp's copies of step j + 1 are there
//!     o = a · o + x
//! ```
//!
//! A warp says that its copies are there behind the softmax, so that they have that long to come, and a warpgroup may be as far ahead of the other as the rest
//! of a step: while one makes weights, the other has the tensor cores. What a step is copied over was read two steps before, by everybody: who waits for step j
//! knows that all warps are behind the softmax of step j − 1.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::listed::gather::{first_of_heads, rows_of_query};
use crate::kernels::listed::rows::{Lists, is_written, place_of_row};
use crate::kernels::listed::warpgroups::steps::*;
use crate::kernels::listed::warpgroups::tile::WarpgroupTile;
use blocksparse_cubecl::arch::ptx::unpack;
use blocksparse_cubecl::arch::sm80::address;
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::copies_are_there;
use blocksparse_cubecl::hopper::output::{OutRow, OutShape, quad_sum, store_row};
use blocksparse_cubecl::hopper::rows::{ROW_PAIR, pack_all};
use blocksparse_cubecl::hopper::softmax::{add_scaled, softmax};
use blocksparse_cubecl::mma::gather::Strides;
use blocksparse_cubecl::shared::score::LOWEST_MAX;
use blocksparse_cubecl::shared::walk::{Four, Slice};

/// As [`forward`](crate::kernels::listed::forward::forward) without other attention to carry on, of `out` in eights of elements.
#[cube(launch_unchecked)]
pub fn forward<S: Size, P: Size, O: Size>(
    q: &[u32],
    k: &[u32],
    v: &[u32],
    keys: &[i32],
    masks: &[u32],
    counts: &[u32],
    out: &mut [Vector<u32, Four>],
    lse: &mut [f32],
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    slice: Slice,
    lists: Lists,
    log2_scale: f32,
    lse_scale: f32,
    #[comptime] t: WarpgroupTile,
) {
    let (rows, own) = comptime!((t.cube_rows(), t.own()));
    let (of_keys, of_values) = comptime!((t.keys(), t.values()));
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let full = base + comptime!(t.full());
    let (k, v) = (address::<u32>(k), address::<u32>(v));
    let begun = begin(
        base,
        k,
        v,
        keys,
        masks,
        counts,
        q_strides.len,
        &k_strides,
        &v_strides,
        &slice,
        &lists,
        warp,
        lane,
        t,
    );
    let (walk, steps, queries) = (begun.walk, begun.steps, begun.queries);
    let mut key = begun.key;
    let first_query = rows_of_query(address::<u32>(q), &q_strides, &walk);
    let warps = comptime!(t.warps());
    let of_q = RowStrides {
        head: q_strides.head,
        query: q_strides.row,
    };
    copy_heads(
        base,
        first_query,
        &of_q,
        queries,
        warp,
        lane,
        warps,
        rows,
        own,
    );
    copy_step(base, 0u32, &key, &walk.sources, warp, lane, t);
    let next = listed(keys, masks, &walk.list, 1u32, warp, lane, t);
    key.position = next.position;
    key.mask = next.mask;
    sync_cube();
    copies_are_there(full, lane);

    let group = warp / 4;
    let q_desc = descriptor(base + group * comptime!((64 * ROW) as u32), 16usize);
    let ring = base + comptime!(t.ring_offset() as u32);
    let k_desc = descriptor(ring, 16usize);
    let v_desc = descriptor(
        ring + comptime!(of_keys.bytes() as u32),
        comptime!(of_values.span_bytes()),
    );
    let mut m0 = f32::new(LOWEST_MAX);
    let mut m1 = f32::new(LOWEST_MAX);
    let mut l0 = f32::new(0.0);
    let mut l1 = f32::new(0.0);
    let mut o = Vector::<f32, O>::zeroed();
    let before = first_of_heads(&walk, slice.heads as u32, q_strides.len, t.heads);
    let row = warp * 16 + lane / 4;
    let upper = out_row(row, q_strides.len, queries, t);
    let lower = out_row(row + ROW_PAIR, q_strides.len, queries, t);
    if comptime!(t.carry) {
        // What is there is a row of the softmax with maximum lse and sum 1, which one lane of four holds.
        let first = select(lane % 4 == 0, f32::new(1.0), f32::new(0.0));
        let log0 = lse[(before + upper.position) as usize];
        if log0 > f32::new(LOWEST_MAX) {
            m0 = log0 * lse_scale;
            l0 = first;
        }
        let log1 = lse[(before + lower.position) as usize];
        if log1 > f32::new(LOWEST_MAX) {
            m1 = log1 * lse_scale;
            l1 = first;
        }
        o = carried::<O>(&out[..], o, before + upper.position, 0usize, lane, t);
        o = carried::<O>(&out[..], o, before + lower.position, 2usize, lane, t);
    }
    let mut stage = 0u32;
    let mut phase = 0u32;
    for j in 0..steps {
        let ahead = next_stage(stage);
        barrier_wait(full + stage * 8, phase);
        let within = u64::cast_from(stage * comptime!((t.step_bytes() >> 4) as u32));
        let started = product::<S>(
            q_desc,
            k_desc + within,
            t.half,
            t.head_dim,
            comptime!(own.span_bytes()),
            comptime!(of_keys.span_bytes()),
        );
        if j + 1 < steps {
            copy_step(base, ahead, &key, &walk.sources, warp, lane, t);
            let next = listed(keys, masks, &walk.list, j + 2, warp, lane, t);
            key.position = next.position;
            key.mask = next.mask;
        }
        let s = wait::<S>(started, 0usize, comptime!(t.cols / 2));
        let s = hide_missing::<S>(s, base, stage, warp, queries, lane, t);
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

/// Sums with one of the unit's two rows that is there, whose numbers begin at `offset` of every four.
#[cube]
fn carried<O: Size>(
    out: &[Vector<u32, Four>],
    o: Vector<f32, O>,
    at: u32,
    #[comptime] offset: usize,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) -> Vector<f32, O> {
    let mut made = o;
    let source = at as usize * comptime!(t.value_dim / 8) + (lane % 4) as usize;
    #[unroll]
    for i in 0..comptime!(t.value_dim / 32) {
        // Four neighbours trade words of eight numbers for their own of four eights.
        let words = trade_four(out[source + comptime!(4 * i)], lane);
        #[unroll]
        for j in 0..4usize {
            let n = comptime!(16 * i + 4 * j + offset);
            let word = words.extract(j);
            made.insert(n, unpack(word, false, t.half));
            made.insert(comptime!(n + 1), unpack(word, true, t.half));
        }
    }
    made
}

/// Where a row is in the output, from that of the first query and head on.
#[cube]
fn out_row(row: u32, seq_q: u32, queries: u32, #[comptime] t: WarpgroupTile) -> OutRow {
    let rows = comptime!(t.cube_rows());
    OutRow {
        position: place_of_row(row, seq_q, queries, rows),
        exists: is_written(row, queries, rows),
    }
}
