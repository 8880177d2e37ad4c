//! The forward kernel: a cube has one query, with the heads that share its list as rows, 16 or 32 of them to a warp, and walks its list. Rows
//! that the heads do not fill repeat the last one's, and are not written.
//!
//! ```text
//! per step j of 16 or 32 keys, of which the next few are on their way to a ring in shared memory:
//!     wait for K(j), V(j)
//!     start K(j + stages − 1), V(j + stages − 1)   cp.async
//!     s = q · K(j)ᵀ                                mma.sync
//!     p = exp2(s − m')                             registers
//!     o = a · o + p · V(j)                         mma.sync
//! ```
//!
//! Nothing is shared between queries, so a cube of 16 rows is a single warp, and several of them on a multiprocessor begin and end by themselves. What
//! binds is the L2 cache: 16 rows do 16 operations for each byte of keys and values.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::listed::gather::*;
use crate::kernels::listed::rows::{head_of_row, is_written};
use crate::kernels::listed::tile::WalkTile;
use blocksparse_cubecl::arch::sm80::*;
use blocksparse_cubecl::mma::forward::{load_row, softmax};
use blocksparse_cubecl::mma::gather::*;
use blocksparse_cubecl::mma::product::*;
use blocksparse_cubecl::mma::tile::ROW_PAIR;
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX};
use blocksparse_cubecl::shared::walk::{Four, Slice};

/// `q`, `k`, `v` with any strides of 16 bytes in their outer dimensions, in words; `lists` `[batch, kv_heads, seq_q, most]`, i32, negative for none;
/// `out` `[batch, heads, seq_q, value_dim]` in words and `lse` `[batch, heads, seq_q]`, contiguous. With `carry` these hold attention to other keys, which is
/// carried on. `p = exp2(s · log2_scale − …)`, and `lse_scale` is `log2 e / log2_scale`.
#[cube(launch_unchecked)]
pub fn forward(
    q: &[u32],
    k: &[u32],
    v: &[u32],
    lists: &[i32],
    out: &mut [u32],
    lse: &mut [f32],
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    slice: Slice,
    most: u32,
    log2_scale: f32,
    lse_scale: f32,
    #[comptime] t: WalkTile,
) {
    let tile = comptime!(t.inner);
    let rows = comptime!(t.cube_rows());
    let tiles = comptime!(tile.warp_tiles);
    let stages = comptime!(tile.stages as u32);
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 128usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
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
    let own = base + comptime!(t.own_offset() as u32);
    copy_query(
        own,
        address::<u32>(q),
        &q_strides,
        &walk,
        comptime!(tile.head_dim),
        t,
    );
    let steps = steps_of(&walk.list, t);
    let mut position = fill_ring(base, lists, &walk, t);

    let warp_rows = warp * comptime!(16 * tile.warp_tiles as u32);
    let first_row = warp_rows + lane / 4;
    let quad = lane % 4 * 2;
    let before = first_of_heads(&walk, slice.heads as u32, q_strides.len, t.heads);
    let mut m = Array::<f32>::new(comptime!(2 * tiles));
    let mut l = Array::<f32>::new(comptime!(2 * tiles));
    let mut o = Array::<Vector<f32, Four>>::new(comptime!(tiles * tile.value_dim / 8));
    let mut top = Array::<f32>::new(1usize);
    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        m[i] = f32::new(LOWEST_MAX);
        l[i] = f32::new(0.0);
    }
    #[unroll]
    for i in 0..comptime!(tiles * tile.value_dim / 8) {
        o[i] = Vector::<f32, Four>::zeroed();
    }
    if comptime!(tile.carry) {
        // What is there is a row of the softmax with maximum lse and sum 1, which one lane of four holds.
        #[unroll]
        for i in 0..comptime!(2 * tiles) {
            let row = head_of_row(first_row + comptime!(i as u32 * ROW_PAIR), rows);
            let at = (before + row * q_strides.len) as usize;
            let log = lse[at];
            if log > f32::new(LOWEST_MAX) {
                m[i] = log * lse_scale;
                l[i] = select(lane % 4 == 0, f32::new(1.0), f32::new(0.0));
            }
            load_row(&out[..], &mut o, at, quad, f32::new(1.0), i, tile);
        }
    }

    let q_rows = own
        + warp_rows * comptime!(tile.pitch(tile.head_dim) as u32)
        + lane_rows(lane, comptime!(tile.head_dim), tile);
    let mut left = Array::<Vector<u32, Four>>::new(comptime!(if t.kept() {
        tile.depth(tile.head_dim)
    } else {
        1
    }));
    wait_copies_but(comptime!(tile.stages - 2));
    sync_cube();
    if comptime!(t.kept()) {
        load_left(q_rows, &mut left, comptime!(tile.head_dim), tile);
        // Now the place may be copied to.
        sync_cube();
    }

    let ring = base + comptime!(t.ring_offset() as u32);
    let k_cols = ring + lane_cols(lane, comptime!(tile.head_dim), tile);
    let v_rows = ring
        + comptime!(tile.b1_bytes() as u32)
        + lane_depth(lane, comptime!(tile.value_dim), tile);
    let mut stage = 0u32;
    let mut next = comptime!(stages - 1).runtime();
    for j in 0..steps {
        wait_copies_but(comptime!(tile.stages - 2));
        sync_cube();
        copy_listed(base, next, position, &walk.sources, t);
        position = listed_position(lists, &walk.list, j + stages, t);
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
            softmax(&mut s, &mut m, &mut l, &mut o, &mut top, log2_scale, tile);
            let p = pack_left(&s, tile);
            accumulate(&p, v_rows + at, &mut o, comptime!(tile.value_dim), tile);
        }
        next = stage;
        stage += 1u32;
        if stage == stages {
            stage = 0u32;
        }
    }

    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        let sum = l[i] + shuffle_xor(l[i], 1u32);
        let sum = sum + shuffle_xor(sum, 2u32);
        let mut inverse = f32::new(0.0);
        let mut log = f32::new(f32::NEG_INFINITY);
        if sum > 0.0f32 {
            inverse = reciprocal(sum);
            log = (m[i] * log2_scale + log2(sum)) * comptime!(std::f32::consts::LN_2);
        }
        let row = first_row + comptime!(i as u32 * ROW_PAIR);
        if is_written(row, 1u32, rows) {
            let at = (before + row * q_strides.len) as usize;
            #[unroll]
            for n in 0..comptime!(tile.value_dim / 8) {
                let four = o[comptime!(i / 2 * (tile.value_dim / 8) + n)];
                let pair = NumberPair {
                    low: four.extract(comptime!(i % 2 * 2)) * inverse,
                    high: four.extract(comptime!(i % 2 * 2 + 1)) * inverse,
                };
                store_pair(
                    out,
                    at * comptime!(tile.words(tile.value_dim)),
                    quad,
                    &pair,
                    n,
                    tile,
                );
            }
            if lane % 4 == 0 {
                lse[at] = log;
            }
        }
    }
}
