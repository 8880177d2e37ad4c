//! Mainloop of a query over its list. A cube has one query, with the heads that share its list as rows, 16 or 32 per warp. Padding rows repeat the last head's
//! and are not written. The gradient with respect to queries is the same mainloop, with the rows of the output's gradient next to them.
//!
//! ```text
//! per step j of 16 or 32 keys; copies of the next few steps are in flight to a ring in shared memory:
//!     wait for K(j), V(j)
//!     start to copy K(j + stages − 1), V(j + stages − 1)   cp.async
//!     s = q · K(j)ᵀ                                        mma.sync
//!     forward:
//!         p = exp2(s − m')                                 registers
//!         o = a · o + p · V(j)                             mma.sync
//!     dQ:
//!         dp = dO · V(j)ᵀ                                  mma.sync
//!         ds = exp2(s − lse) ∘ (dp − delta)                registers
//!         dq += ds · K(j)                                  mma.sync
//! ```
//!
//! Queries share nothing, so a cube of 16 rows is a single warp, and several cubes on a multiprocessor run independently. The L2 cache is the bottleneck: 16
//! rows do 16 operations per byte of keys and values.

// Kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::listed::gather::*;
use crate::kernels::listed::tile::{MainloopTile, head_of_row, is_written};
use crate::kernels::listed::views::Input;
use blocksparse_cubecl::arch::sm80::*;
use blocksparse_cubecl::mma::forward::{load_row, softmax};
use blocksparse_cubecl::mma::gather::*;
use blocksparse_cubecl::mma::product::*;
use blocksparse_cubecl::mma::tile::ROW_PAIR;
use blocksparse_cubecl::shared::addressing::{Four, Slice};
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX};

/// Computes the attention of each query to its list, or dQ. `q`, `k`, `v` and, for dQ, `grad_out` are words, with any strides of 16 bytes in their outer
/// dimensions; `lists` are i32 `[batch, kv_heads, seq_q, most]`, negative for empty entries. `out` is contiguous words: `[batch, heads, seq_q, value_dim]`, or
/// dQ `[batch, heads, seq_q, head_dim]`. `rows` are lse `[batch, heads, seq_q]`, or for dQ pairs of `lse · log2 e` and delta, which are only read. With `carry`
/// the outputs hold attention to other keys, which is continued, or a gradient, which is accumulated. `p = exp2(s · log2_scale − …)`, and `lse_scale` is
/// `log2 e / log2_scale`.
#[cube(launch_unchecked)]
pub fn mainloop(
    q: Input,
    k: Input,
    v: Input,
    grad_out: Input,
    lists: &[i32],
    out: &mut [u32],
    rows: &mut [f32],
    slice: Slice,
    most: u32,
    scale: f32,
    log2_scale: f32,
    lse_scale: f32,
    #[comptime] t: MainloopTile,
) {
    let (tile, heads) = comptime!((t.inner, t.cube_rows()));
    let tiles = comptime!(tile.warp_tiles);
    let stages = comptime!(tile.stages as u32);
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 128usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let mainloop = list_mainloop(q.strides.len, &k, &v, &slice, most, heads);
    let own = base + comptime!(t.own_offset() as u32);
    let second = base + comptime!(t.second_offset() as u32);
    copy_query(own, &q, &mainloop, comptime!(tile.head_dim), t);
    if comptime!(t.backward) {
        copy_query(second, &grad_out, &mainloop, comptime!(tile.value_dim), t);
    }
    let steps = steps_of(&mainloop.list, t);
    let mut position = fill_ring(base, lists, &mainloop, t);

    let warp_rows = warp * comptime!(16 * tile.warp_tiles as u32);
    let first_row = warp_rows + lane / 4;
    let quad = lane % 4 * 2;
    let before = first_of_heads(&mainloop, slice.heads as u32, q.strides.len, t.heads);
    // Softmax state of each row, maximum and sum, or lse and delta.
    let mut m = Array::<f32>::new(comptime!(2 * tiles));
    let mut l = Array::<f32>::new(comptime!(2 * tiles));
    let mut o = Array::<Vector<f32, Four>>::new(comptime!(tiles * t.out_dim() / 8));
    let mut top = Array::<f32>::new(1usize);
    #[unroll]
    for i in 0..comptime!(tiles * t.out_dim() / 8) {
        o[i] = Vector::<f32, Four>::zeroed();
    }
    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        let row = head_of_row(first_row + comptime!(i as u32 * ROW_PAIR), heads);
        let at = (before + row * q.strides.len) as usize;
        if comptime!(t.backward) {
            m[i] = rows[at * 2];
            l[i] = rows[at * 2 + 1];
        } else {
            m[i] = f32::new(LOWEST_MAX);
            l[i] = f32::new(0.0);
            if comptime!(tile.carry) {
                // The existing output is a softmax state with maximum lse and sum 1; one of the four lanes of a row holds the sum.
                let log = rows[at];
                if log > f32::new(LOWEST_MAX) {
                    m[i] = log * lse_scale;
                    l[i] = select(lane % 4 == 0, f32::new(1.0), f32::new(0.0));
                }
                load_row(&out[..], &mut o, at, quad, f32::new(1.0), i, tile);
            }
        }
    }

    let q_rows = own
        + warp_rows * comptime!(tile.pitch(tile.head_dim) as u32)
        + lane_rows(lane, comptime!(tile.head_dim), tile);
    let out_rows = second
        + warp_rows * comptime!(tile.pitch(tile.value_dim) as u32)
        + lane_rows(lane, comptime!(tile.value_dim), tile);
    let mut left = Array::<Vector<u32, Four>>::new(comptime!(t.kept_depth(tile.head_dim)));
    let mut left_out = Array::<Vector<u32, Four>>::new(comptime!(if t.backward {
        t.kept_depth(tile.value_dim)
    } else {
        1
    }));
    wait_copies_but(comptime!(tile.stages - 2));
    sync_cube();
    if comptime!(t.kept()) {
        load_left(q_rows, &mut left, comptime!(tile.head_dim), tile);
        if comptime!(t.backward) {
            load_left(out_rows, &mut left_out, comptime!(tile.value_dim), tile);
        }
        // From here on copies may overwrite the query's rows.
        sync_cube();
    }

    let ring = base + comptime!(t.ring_offset() as u32);
    let values = ring + comptime!(tile.b1_bytes() as u32);
    let k_cols = ring + lane_cols(lane, comptime!(tile.head_dim), tile);
    let k_rows = ring + lane_depth(lane, comptime!(tile.head_dim), tile);
    let v_cols = values + lane_cols(lane, comptime!(tile.value_dim), tile);
    let v_rows = values + lane_depth(lane, comptime!(tile.value_dim), tile);
    let mut stage = 0u32;
    let mut next = comptime!(stages - 1).runtime();
    for j in 0..steps {
        wait_copies_but(comptime!(tile.stages - 2));
        sync_cube();
        copy_listed(base, next, position, &mainloop.sources, t);
        position = listed_position(lists, &mainloop.list, j + stages, t);
        let there = uniform(shared_load(base + stage * 4));
        if there != 0u32 {
            let at = stage * comptime!(t.step_bytes() as u32);
            let mut s = product(
                q_rows,
                &left,
                k_cols + at,
                comptime!(t.kept()),
                comptime!(tile.head_dim),
                tile,
            );
            if there != comptime!(ALL) {
                hide(&mut s, there, quad, f32::new(LOW), t);
            }
            if comptime!(t.backward) {
                let mut dp = product(
                    out_rows,
                    &left_out,
                    v_cols + at,
                    comptime!(t.kept()),
                    comptime!(tile.value_dim),
                    tile,
                );
                by_scores(&s, &mut dp, &m, &l, log2_scale, t);
                let ds = pack_left(&dp, tile);
                accumulate(&ds, k_rows + at, &mut o, comptime!(tile.head_dim), tile);
            } else {
                softmax(&mut s, &mut m, &mut l, &mut o, &mut top, log2_scale, tile);
                let p = pack_left(&s, tile);
                accumulate(&p, v_rows + at, &mut o, comptime!(tile.value_dim), tile);
            }
        }
        next = stage;
        stage += 1u32;
        if stage == stages {
            stage = 0u32;
        }
    }

    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        let mut factor = scale;
        let mut log = f32::new(f32::NEG_INFINITY);
        if comptime!(!t.backward) {
            factor = f32::new(0.0);
            let sum = l[i] + shuffle_xor(l[i], 1u32);
            let sum = sum + shuffle_xor(sum, 2u32);
            if sum > 0.0f32 {
                factor = reciprocal(sum);
                log = (m[i] * log2_scale + log2(sum)) * comptime!(std::f32::consts::LN_2);
            }
        }
        let row = first_row + comptime!(i as u32 * ROW_PAIR);
        if is_written(row, 1u32, heads) {
            let at = (before + row * q.strides.len) as usize;
            let words = at * comptime!(tile.words(t.out_dim()));
            #[unroll]
            for n in 0..comptime!(t.out_dim() / 8) {
                let four = o[comptime!(i / 2 * (t.out_dim() / 8) + n)];
                let mut pair = NumberPair {
                    low: four.extract(comptime!(i % 2 * 2)) * factor,
                    high: four.extract(comptime!(i % 2 * 2 + 1)) * factor,
                };
                if comptime!(t.backward && tile.carry) {
                    let there = load_pair(&out[..], words, quad, n, tile);
                    pair.low += there.low;
                    pair.high += there.high;
                }
                store_pair(out, words, quad, &pair, n, tile);
            }
            if comptime!(!t.backward) {
                if lane % 4 == 0 {
                    rows[at] = log;
                }
            }
        }
    }
}

/// Converts gradients with respect to weights to those with respect to scores, by lse and delta of each row.
#[cube]
fn by_scores(
    s: &Array<Vector<f32, Four>>,
    dp: &mut Array<Vector<f32, Four>>,
    lse: &Array<f32>,
    delta: &Array<f32>,
    log2_scale: f32,
    #[comptime] t: MainloopTile,
) {
    let eights = comptime!(t.inner.eights());
    #[unroll]
    for n in 0..comptime!(t.inner.warp_tiles * eights) {
        let scores = s[n];
        let mut four = dp[n];
        #[unroll]
        for i in 0..4usize {
            let row = comptime!(n / eights * 2 + i / 2);
            let p = exp2(multiply_add(scores.extract(i), log2_scale, -lse[row]));
            four.insert(i, p * (four.extract(i) - delta[row]));
        }
        dp[n] = four;
    }
}
