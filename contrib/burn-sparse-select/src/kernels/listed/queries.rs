//! The gradient by queries: the walk of the forward pass once more, with the rows of the output's gradient beside those of the query.
//!
//! ```text
//! s = q · K(j)ᵀ    p = exp2(s − lse)    dp = dO · V(j)ᵀ    ds = p ∘ (dp − delta)    dq += ds · K(j)
//! ```

use cubecl::prelude::*;

use crate::kernels::listed::gather::*;
use crate::kernels::listed::rows::{head_of_row, is_written};
use crate::kernels::listed::tile::WalkTile;
use blocksparse_cubecl::arch::sm80::*;
use blocksparse_cubecl::mma::gather::*;
use blocksparse_cubecl::mma::product::*;
use blocksparse_cubecl::mma::tile::ROW_PAIR;
use blocksparse_cubecl::shared::score::LOW;
use blocksparse_cubecl::shared::walk::{Four, Slice};

/// As [`forward`](crate::kernels::listed::forward::forward) has them; `grad_out` likewise, `stats` `[batch · heads, seq_q, 2]`: `lse · log2 e` and delta of each query. `grad`
/// `[batch, heads, seq_q, head_dim]` in words, contiguous, to which the gradient is added with `carry`.
#[cube(launch_unchecked)]
pub fn queries(
    q: &[u32],
    k: &[u32],
    v: &[u32],
    grad_out: &[u32],
    stats: &[f32],
    lists: &[i32],
    grad: &mut [u32],
    q_strides: Strides,
    k_strides: Strides,
    v_strides: Strides,
    out_strides: Strides,
    slice: Slice,
    most: u32,
    scale: f32,
    log2_scale: f32,
    #[comptime] t: WalkTile,
) {
    let tile = comptime!(t.inner);
    let rows = comptime!(t.cube_rows());
    let tiles = comptime!(tile.warp_tiles);
    let eights = comptime!(tile.eights());
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
    let second = base + comptime!(t.second_offset() as u32);
    copy_query(
        own,
        address::<u32>(q),
        &q_strides,
        &walk,
        comptime!(tile.head_dim),
        t,
    );
    copy_query(
        second,
        address::<u32>(grad_out),
        &out_strides,
        &walk,
        comptime!(tile.value_dim),
        t,
    );
    let steps = steps_of(&walk.list, t);
    let mut position = fill_ring(base, lists, &walk, t);

    let warp_rows = warp * comptime!(16 * tile.warp_tiles as u32);
    let first_row = warp_rows + lane / 4;
    let quad = lane % 4 * 2;
    let before = first_of_heads(&walk, slice.heads as u32, q_strides.len, t.heads);
    let mut row_lse = Array::<f32>::new(comptime!(2 * tiles));
    let mut row_delta = Array::<f32>::new(comptime!(2 * tiles));
    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        let row = head_of_row(first_row + comptime!(i as u32 * ROW_PAIR), rows);
        let at = (before + row * q_strides.len) as usize * 2;
        row_lse[i] = stats[at];
        row_delta[i] = stats[at + 1];
    }
    let mut dq = Array::<Vector<f32, Four>>::new(comptime!(tiles * tile.head_dim / 8));
    #[unroll]
    for i in 0..comptime!(tiles * tile.head_dim / 8) {
        dq[i] = Vector::<f32, Four>::zeroed();
    }

    let q_rows = own
        + warp_rows * comptime!(tile.pitch(tile.head_dim) as u32)
        + lane_rows(lane, comptime!(tile.head_dim), tile);
    let out_rows = second
        + warp_rows * comptime!(tile.pitch(tile.value_dim) as u32)
        + lane_rows(lane, comptime!(tile.value_dim), tile);
    let mut left = Array::<Vector<u32, Four>>::new(comptime!(if t.kept() {
        tile.depth(tile.head_dim)
    } else {
        1
    }));
    let mut left_out = Array::<Vector<u32, Four>>::new(comptime!(if t.kept() {
        tile.depth(tile.value_dim)
    } else {
        1
    }));
    wait_copies_but(comptime!(tile.stages - 2));
    sync_cube();
    if comptime!(t.kept()) {
        load_left(q_rows, &mut left, comptime!(tile.head_dim), tile);
        load_left(out_rows, &mut left_out, comptime!(tile.value_dim), tile);
        // Now the place may be copied to.
        sync_cube();
    }

    let ring = base + comptime!(t.ring_offset() as u32);
    let k_cols = ring + lane_cols(lane, comptime!(tile.head_dim), tile);
    let k_rows = ring + lane_depth(lane, comptime!(tile.head_dim), tile);
    let v_cols =
        ring + comptime!(tile.b1_bytes() as u32) + lane_cols(lane, comptime!(tile.value_dim), tile);
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
            let mut dp = product(
                out_rows,
                &left_out,
                v_cols + at,
                comptime!(t.kept()),
                comptime!(tile.value_dim),
                tile,
            );
            #[unroll]
            for n in 0..comptime!(tiles * eights) {
                let scores = s[n];
                let mut four = dp[n];
                #[unroll]
                for i in 0..4usize {
                    let row = comptime!(n / eights * 2 + i / 2);
                    let p = exp2(multiply_add(scores.extract(i), log2_scale, -row_lse[row]));
                    four.insert(i, p * (four.extract(i) - row_delta[row]));
                }
                dp[n] = four;
            }
            let ds = pack_left(&dp, tile);
            accumulate(&ds, k_rows + at, &mut dq, comptime!(tile.head_dim), tile);
        }
        next = stage;
        stage += 1u32;
        if stage == stages {
            stage = 0u32;
        }
    }

    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        let row = first_row + comptime!(i as u32 * ROW_PAIR);
        if is_written(row, 1u32, rows) {
            let at = (before + row * q_strides.len) as usize * comptime!(tile.words(tile.head_dim));
            #[unroll]
            for n in 0..comptime!(tile.head_dim / 8) {
                let four = dq[comptime!(i / 2 * (tile.head_dim / 8) + n)];
                let mut pair = NumberPair {
                    low: four.extract(comptime!(i % 2 * 2)) * scale,
                    high: four.extract(comptime!(i % 2 * 2 + 1)) * scale,
                };
                if comptime!(tile.carry) {
                    let there = load_pair(&grad[..], at, quad, n, tile);
                    pair.low += there.low;
                    pair.high += there.high;
                }
                store_pair(grad, at, quad, &pair, n, tile);
            }
        }
    }
}
