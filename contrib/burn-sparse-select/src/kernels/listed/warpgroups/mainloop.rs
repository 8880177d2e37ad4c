//! Mainloop of many heads over a list. A cube has one query, or a group of adjacent ones, with 64 of the heads that share the list per warpgroup. The gradient
//! with respect to queries is the same mainloop, with rows of dO next to those of q.
//!
//! ```text
//! every warpgroup, per step j of the list:
//!     wait until all warps' copies of K(j), V(j) are complete    mbarrier
//!     start s = q · K(j)ᵀ                                        wgmma
//!     start to copy this warp's rows of K(j + 1), V(j + 1)       cp.async
//!     p = exp2(s − m')                                           registers
//!     start x = p · V(j)                                         wgmma, p in registers
//!     signal that this warp's copies of step j + 1 are complete
//!     o = a · o + x
//! dQ:
//!     s = q · K(j)ᵀ    dp = dO · V(j)ᵀ    ds = exp2(s − lse) ∘ (dp − delta)    dq += ds · K(j)
//! ```
//!
//! A warp signals the arrival of its copies after the softmax, which leaves them that long to complete. A warpgroup may run ahead of the other by the rest of a
//! step: while one computes weights, the other uses the tensor cores. A stage is overwritten two steps after its last read: a warp that passes the barrier of
//! step j knows that all warps have finished the softmax of step j − 1.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::listed::gather::{first_of_heads, rows_of_query};
use crate::kernels::listed::tile::{ListTensors, Lists, is_written, place_of_row};
use crate::kernels::listed::views::Input;
use crate::kernels::listed::warpgroups::steps::*;
use crate::kernels::listed::warpgroups::tile::WarpgroupTile;
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::copies_are_there;
use blocksparse_cubecl::hopper::output::{OutShape, RowPosition, quad_sum, store_row};
use blocksparse_cubecl::hopper::rows::{ROW_PAIR, pack_all};
use blocksparse_cubecl::hopper::softmax::{add_scaled, softmax};
use blocksparse_cubecl::shared::addressing::{Four, Slice};
use blocksparse_cubecl::shared::score::LOWEST_MAX;

/// Arguments are as in [`mainloop`](crate::kernels::listed::mainloop::mainloop), with `out` in vectors of eight elements; a gradient is accumulated.
#[cube(launch_unchecked)]
pub fn mainloop<S: Size, P: Size, O: Size>(
    q: Input,
    k: Input,
    v: Input,
    grad_out: Input,
    tensors: ListTensors,
    out: &mut [Vector<u32, Four>],
    of_rows: &mut [f32],
    slice: Slice,
    lists: Lists,
    scale: f32,
    log2_scale: f32,
    lse_scale: f32,
    #[comptime] t: WarpgroupTile,
) {
    let (rows, own, second) = comptime!((t.cube_rows(), t.own(), t.second()));
    let (of_keys, of_values) = comptime!((t.keys(), t.values()));
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let full = base + comptime!(t.full());
    let seq_q = q.strides.len;
    let begun = begin(base, &k, &v, &tensors, seq_q, &slice, &lists, warp, lane, t);
    let (mainloop, steps, queries) = (begun.mainloop, begun.steps, begun.queries);
    let mut key = begun.key;
    let warps = comptime!(t.warps());
    let of_q = rows_of_query(&q, &mainloop);
    let q_rows = RowStrides {
        head: q.strides.head,
        query: q.strides.row,
    };
    copy_heads(base, of_q, &q_rows, queries, warp, lane, warps, rows, own);
    let out_at = base + comptime!(own.bytes() as u32);
    if comptime!(t.backward) {
        let of_out = rows_of_query(&grad_out, &mainloop);
        let out_rows = RowStrides {
            head: grad_out.strides.head,
            query: grad_out.strides.row,
        };
        copy_heads(
            out_at, of_out, &out_rows, queries, warp, lane, warps, rows, second,
        );
    }
    copy_step(base, 0u32, &key, &mainloop.sources, warp, lane, t);
    let next = listed(&tensors, &mainloop.list, 1u32, warp, lane, t);
    key.position = next.position;
    key.mask = next.mask;
    let before = first_of_heads(&mainloop, slice.heads as u32, seq_q, t.heads);
    let row = warp * 16 + lane / 4;
    let upper = out_row(row, seq_q, queries, t);
    let lower = out_row(row + ROW_PAIR, seq_q, queries, t);
    let upper_at = (before + upper.position) as usize;
    let lower_at = (before + lower.position) as usize;
    // Softmax state of each row, maximum and sum, or lse and delta.
    let mut m0 = f32::new(LOWEST_MAX);
    let mut m1 = f32::new(LOWEST_MAX);
    let mut l0 = f32::new(0.0);
    let mut l1 = f32::new(0.0);
    if comptime!(t.backward) {
        m0 = of_rows[upper_at * 2];
        l0 = of_rows[upper_at * 2 + 1];
        m1 = of_rows[lower_at * 2];
        l1 = of_rows[lower_at * 2 + 1];
    }
    sync_cube();
    copies_are_there(full, lane);

    let group = warp / 4 * comptime!((64 * ROW) as u32);
    let q_desc = descriptor(base + group, 16usize);
    let out_desc = descriptor(out_at + group, 16usize);
    let ring = base + comptime!(t.ring_offset() as u32);
    let values = ring + comptime!(of_keys.bytes() as u32);
    let k_desc = descriptor(ring, 16usize);
    let k_depth = descriptor(ring, comptime!(of_keys.span_bytes()));
    let v_desc = descriptor(values, 16usize);
    let v_depth = descriptor(values, comptime!(of_values.span_bytes()));
    let mut o = Vector::<f32, O>::zeroed();
    if comptime!(t.carry) {
        // The existing output is a softmax state with maximum lse and sum 1; one of the four lanes of a row holds the sum.
        let first = select(lane % 4 == 0, f32::new(1.0), f32::new(0.0));
        let log0 = of_rows[upper_at];
        if log0 > f32::new(LOWEST_MAX) {
            m0 = log0 * lse_scale;
            l0 = first;
        }
        let log1 = of_rows[lower_at];
        if log1 > f32::new(LOWEST_MAX) {
            m1 = log1 * lse_scale;
            l1 = first;
        }
        o = carried::<O>(&out[..], o, upper_at, 0usize, lane, t);
        o = carried::<O>(&out[..], o, lower_at, 2usize, lane, t);
    }
    let mut stage = 0u32;
    let mut phase = 0u32;
    for j in 0..steps {
        let ahead = next_stage(stage);
        barrier_wait(full + stage * 8, phase);
        let within = u64::cast_from(stage * comptime!((t.step_bytes() >> 4) as u32));
        let s_started = product::<S>(
            q_desc,
            k_desc + within,
            comptime!(own.product(of_keys, t.half, t.head_dim)),
        );
        // Registers of a wgmma in flight must not be copied, so this is an expression instead of an assignment.
        let dp_started = if comptime!(t.backward) {
            product::<S>(
                out_desc,
                v_desc + within,
                comptime!(second.product(of_values, t.half, t.value_dim)),
            )
        } else {
            Vector::<f32, S>::zeroed()
        };
        if j + 1 < steps {
            copy_step(base, ahead, &key, &mainloop.sources, warp, lane, t);
            let next = listed(&tensors, &mainloop.list, j + 2, warp, lane, t);
            key.position = next.position;
            key.mask = next.mask;
        }
        let under_way = comptime!(if t.backward { 1usize } else { 0usize });
        let s = wait::<S>(s_started, under_way, comptime!(t.cols / 2));
        let s = hide_missing::<S>(s, base, stage, warp, queries, lane, t);
        if comptime!(t.backward) {
            let p = weights::<S>(s, m0, m1, log2_scale, t.cols);
            let dp = wait::<S>(dp_started, 0usize, comptime!(t.cols / 2));
            let ds = by_scores::<S>(p, dp, l0, l1, t.cols);
            let left = pack_all::<S, P>(ds, t.half);
            let started = accumulate::<P, O>(o, left, k_depth + within, t.half, t.head_dim);
            if j + 1 < steps {
                copies_are_there(full + ahead * 8, lane);
            }
            o = wait::<O>(started, 0usize, comptime!(t.head_dim / 2));
        } else {
            let soft = softmax::<S>(s, 0u32, m0, m1, l0, l1, log2_scale, None);
            m0 = soft.m0;
            m1 = soft.m1;
            l0 = soft.l0;
            l1 = soft.l1;
            let p = pack_all::<S, P>(soft.p, t.half);
            let started = weigh::<P, O>(p, v_depth + within, t.half, t.value_dim);
            if j + 1 < steps {
                copies_are_there(full + ahead * 8, lane);
            }
            let x = wait::<O>(started, 0usize, comptime!(t.value_dim / 2));
            o = add_scaled::<O>(o, x, soft.a0, soft.a1, t.value_dim);
        }
        stage = ahead;
        if stage == 0 {
            phase = 1 - phase;
        }
    }

    if comptime!(t.backward) {
        add_row::<O>(out, &o, 0usize, scale, upper_at, upper.exists, lane, t);
        add_row::<O>(out, &o, 2usize, scale, lower_at, lower.exists, lane, t);
    } else {
        let shape = comptime!(OutShape {
            value_dim: t.value_dim,
            half: t.half,
            dropout: false,
        });
        let (top0, top1) = (m0 * log2_scale, m1 * log2_scale);
        let (sum0, sum1) = (quad_sum(l0), quad_sum(l1));
        let one = f32::new(1.0);
        store_row::<O>(
            out, of_rows, &o, 0usize, top0, sum0, one, before, &upper, shape,
        );
        store_row::<O>(
            out, of_rows, &o, 2usize, top1, sum1, one, before, &lower, shape,
        );
    }
}

/// Converts the unit's scores of two rows to weights.
#[cube]
pub fn weights<S: Size>(
    s: Vector<f32, S>,
    lse0: f32,
    lse1: f32,
    log2_scale: f32,
    #[comptime] cols: usize,
) -> Vector<f32, S> {
    let mut p = Vector::<f32, S>::zeroed();
    #[unroll]
    for at in 0..comptime!(cols / 2) {
        let log = if comptime!(at % 4 < 2) { lse0 } else { lse1 };
        p.insert(at, exp2(multiply_add(s.extract(at), log2_scale, -log)));
    }
    p
}

/// Converts gradients with respect to weights to those with respect to scores.
#[cube]
pub fn by_scores<S: Size>(
    p: Vector<f32, S>,
    dp: Vector<f32, S>,
    delta0: f32,
    delta1: f32,
    #[comptime] cols: usize,
) -> Vector<f32, S> {
    let mut ds = Vector::<f32, S>::zeroed();
    #[unroll]
    for at in 0..comptime!(cols / 2) {
        let delta = if comptime!(at % 4 < 2) {
            delta0
        } else {
            delta1
        };
        ds.insert(at, p.extract(at) * (dp.extract(at) - delta));
    }
    ds
}

/// Loads one of the unit's two existing output rows into the sums, at `offset` of every four elements.
#[cube]
fn carried<O: Size>(
    out: &[Vector<u32, Four>],
    o: Vector<f32, O>,
    at: usize,
    #[comptime] offset: usize,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) -> Vector<f32, O> {
    let mut made = o;
    let source = at * comptime!(t.value_dim / 8) + (lane % 4) as usize;
    #[unroll]
    for i in 0..comptime!(t.value_dim / 32) {
        // Four adjacent units transpose words of eight elements to their own parts of four groups of eight.
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

/// Returns the offset of a row in the output, in rows from that of the first query and head.
#[cube]
fn out_row(row: u32, seq_q: u32, queries: u32, #[comptime] t: WarpgroupTile) -> RowPosition {
    let rows = comptime!(t.cube_rows());
    RowPosition {
        position: place_of_row(row, seq_q, queries, rows),
        exists: is_written(row, queries, rows),
    }
}

/// Accumulates one of the unit's two rows, at `offset` of every four elements, onto the gradient.
#[cube]
fn add_row<O: Size>(
    grad: &mut [Vector<u32, Four>],
    dq: &Vector<f32, O>,
    #[comptime] offset: usize,
    scale: f32,
    at: usize,
    exists: bool,
    lane: u32,
    #[comptime] t: WarpgroupTile,
) {
    let target = at * comptime!(t.head_dim / 8) + (lane % 4) as usize;
    #[unroll]
    for i in 0..comptime!(t.head_dim / 32) {
        let mut there = Vector::<u32, Four>::zeroed();
        if exists {
            there = grad[target + comptime!(4 * i)];
        }
        let before = trade_four(there, lane);
        let mut own = Vector::<u32, Four>::zeroed();
        #[unroll]
        for j in 0..4usize {
            let n = comptime!(16 * i + 4 * j + offset);
            let word = before.extract(j);
            let low = multiply_add(dq.extract(n), scale, unpack(word, false, t.half));
            let next = dq.extract(comptime!(n + 1));
            let high = multiply_add(next, scale, unpack(word, true, t.half));
            own.insert(j, pack(low, high, t.half));
        }
        let four = trade_four(own, lane);
        if exists {
            grad[target + comptime!(4 * i)] = four;
        }
    }
}
