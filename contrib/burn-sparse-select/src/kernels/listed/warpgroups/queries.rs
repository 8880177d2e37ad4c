//! The gradient by queries of many heads: the walk of the forward kernel, with rows of dO beside those of q.
//!
//! ```text
//! s = q · K(j)ᵀ    dp = dO · V(j)ᵀ    ds = exp2(s − lse) ∘ (dp − delta)    dq += ds · K(j)
//! ```

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::listed::gather::{first_of_heads, rows_of_query};
use crate::kernels::listed::rows::{Lists, is_written, place_of_row};
use crate::kernels::listed::warpgroups::steps::*;
use crate::kernels::listed::warpgroups::tile::WarpgroupTile;
use blocksparse_cubecl::arch::sm80::address;
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::copies_are_there;
use blocksparse_cubecl::hopper::rows::{ROW_PAIR, pack_all};
use blocksparse_cubecl::mma::gather::Strides;
use blocksparse_cubecl::shared::walk::{Four, Slice};

/// As [`queries`](crate::kernels::listed::queries::queries), of `grad` in eights of elements, to which the gradient is added.
#[cube(launch_unchecked)]
pub fn queries<S: Size, P: Size, O: Size>(
    q: &[u32],
    k: &[u32],
    v: &[u32],
    grad_out: &[u32],
    stats: &[f32],
    keys: &[i32],
    masks: &[u32],
    counts: &[u32],
    grad: &mut [Vector<u32, Four>],
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    out_strides: Strides,
    slice: Slice,
    lists: Lists,
    scale: f32,
    log2_scale: f32,
    #[comptime] t: WarpgroupTile,
) {
    let (rows, own, second) = comptime!((t.cube_rows(), t.own(), t.second()));
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
    let warps = comptime!(t.warps());
    let of_q = rows_of_query(address::<u32>(q), &q_strides, &walk);
    let q_rows = RowStrides {
        head: q_strides.head,
        query: q_strides.row,
    };
    copy_heads(base, of_q, &q_rows, queries, warp, lane, warps, rows, own);
    let out_at = base + comptime!(own.bytes() as u32);
    let of_out = rows_of_query(address::<u32>(grad_out), &out_strides, &walk);
    let out_rows = RowStrides {
        head: out_strides.head,
        query: out_strides.row,
    };
    copy_heads(
        out_at, of_out, &out_rows, queries, warp, lane, warps, rows, second,
    );
    copy_step(base, 0u32, &key, &walk.sources, warp, lane, t);
    let next = listed(keys, masks, &walk.list, 1u32, warp, lane, t);
    key.position = next.position;
    key.mask = next.mask;
    let before = first_of_heads(&walk, slice.heads as u32, q_strides.len, t.heads);
    let row = warp * 16 + lane / 4;
    let upper = before + place_of_row(row, q_strides.len, queries, rows);
    let lower = before + place_of_row(row + ROW_PAIR, q_strides.len, queries, rows);
    let at = upper as usize * 2;
    let (lse0, delta0) = (stats[at], stats[at + 1]);
    let at = lower as usize * 2;
    let (lse1, delta1) = (stats[at], stats[at + 1]);
    sync_cube();
    copies_are_there(full, lane);

    let group = warp / 4 * comptime!((64 * ROW) as u32);
    let q_desc = descriptor(base + group, 16usize);
    let out_desc = descriptor(out_at + group, 16usize);
    let ring = base + comptime!(t.ring_offset() as u32);
    let k_desc = descriptor(ring, 16usize);
    let k_depth = descriptor(ring, comptime!(of_keys.span_bytes()));
    let v_desc = descriptor(ring + comptime!(of_keys.bytes() as u32), 16usize);
    let mut dq = Vector::<f32, O>::zeroed();
    let mut stage = 0u32;
    let mut phase = 0u32;
    for j in 0..steps {
        let ahead = next_stage(stage);
        barrier_wait(full + stage * 8, phase);
        let within = u64::cast_from(stage * comptime!((t.step_bytes() >> 4) as u32));
        let s_started = product::<S>(
            q_desc,
            k_desc + within,
            t.half,
            t.head_dim,
            comptime!(own.span_bytes()),
            comptime!(of_keys.span_bytes()),
        );
        let dp_started = product::<S>(
            out_desc,
            v_desc + within,
            t.half,
            t.value_dim,
            comptime!(second.span_bytes()),
            comptime!(of_values.span_bytes()),
        );
        if j + 1 < steps {
            copy_step(base, ahead, &key, &walk.sources, warp, lane, t);
            let next = listed(keys, masks, &walk.list, j + 2, warp, lane, t);
            key.position = next.position;
            key.mask = next.mask;
        }
        let s = wait::<S>(s_started, 1usize, comptime!(t.cols / 2));
        let s = hide_missing::<S>(s, base, stage, warp, queries, lane, t);
        let mut p = Vector::<f32, S>::zeroed();
        #[unroll]
        for n in 0..comptime!(t.cols / 8) {
            #[unroll]
            for i in 0..4usize {
                let at = comptime!(4 * n + i);
                let log = if comptime!(i < 2) { lse0 } else { lse1 };
                p.insert(at, exp2(multiply_add(s.extract(at), log2_scale, -log)));
            }
        }
        let dp = wait::<S>(dp_started, 0usize, comptime!(t.cols / 2));
        let mut ds = Vector::<f32, S>::zeroed();
        #[unroll]
        for n in 0..comptime!(t.cols / 8) {
            #[unroll]
            for i in 0..4usize {
                let at = comptime!(4 * n + i);
                let delta = if comptime!(i < 2) { delta0 } else { delta1 };
                ds.insert(at, p.extract(at) * (dp.extract(at) - delta));
            }
        }
        let left = pack_all::<S, P>(ds, t.half);
        let started = accumulate::<P, O>(dq, left, k_depth + within, t.half, t.head_dim);
        if j + 1 < steps {
            copies_are_there(full + ahead * 8, lane);
        }
        dq = wait::<O>(started, 0usize, comptime!(t.head_dim / 2));
        stage = ahead;
        if stage == 0 {
            phase = 1 - phase;
        }
    }

    let (upper, lower) = (upper as usize, lower as usize);
    let is_upper = is_written(row, queries, rows);
    let is_lower = is_written(row + ROW_PAIR, queries, rows);
    add_row::<O>(grad, &dq, 0usize, scale, upper, is_upper, lane, t);
    add_row::<O>(grad, &dq, 2usize, scale, lower, is_lower, lane, t);
}

/// Adds one of the unit's two rows, whose numbers begin at `offset` of every four, to what is there.
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
