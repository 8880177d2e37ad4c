//! The kernel: a cube has a cluster, and copies its rows by cp.async to where TMA's swizzle would put them.
//!
//! ```text
//! all warps      x and values of the cluster's rows                   cp.async
//!                one over the length of each row of x                 while values come
//!
//! warpgroup      s = x[own 64] · x[64 of step j]ᵀ                     wgmma, steps up to its own
//!                p = exp2(s · inverses − m)                           registers
//!                o = a · o + p · values[64 of step j]                 wgmma, p in registers
//! ```

use cubecl::prelude::*;

use crate::kernels::clusters::tile::{ClusterTile, STEP};
use blocksparse_cubecl::arch::sm80::{address, commit_copies, shared_load_pair, wait_copies_but};
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::{
    ROWS_AT_A_TIME, Spans, copy_row, lane_row, load_piece, own_copies,
};
use blocksparse_cubecl::hopper::output::{OutRow, OutShape, quad_sum, store_row};
use blocksparse_cubecl::hopper::rows::{ROW_PAIR, pack_all};
use blocksparse_cubecl::hopper::softmax::{add_scaled, softmax};
use blocksparse_cubecl::mma::tile::NOWHERE;
use blocksparse_cubecl::rows::SMALLEST_SQUARE;
use blocksparse_cubecl::shared::score::LOWEST_MAX;
use blocksparse_cubecl::shared::walk::Four;

/// See [`ClusterPlan::attend`](crate::kernels::clusters::ClusterPlan::attend). Tensors are in words, `out` in eights of elements.
#[cube(launch_unchecked)]
pub fn attend<S: Size, P: Size, O: Size>(
    x: &[u32],
    value: &[u32],
    tokens: &[i32],
    out: &mut [Vector<u32, Four>],
    lse: &mut [f32],
    // Of all lists, of each, and rows of a list.
    count: u32,
    clusters: u32,
    length: u32,
    log2_scale: f32,
    #[comptime] t: ClusterTile,
) {
    let (of_x, of_values) = comptime!((t.x(), t.values()));
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    // Cubes beyond the last cluster do as it does, and write nothing.
    let asked = CUBE_POS as u32;
    let cluster = min(asked, count - 1);
    let list = u64::cast_from(cluster / clusters * length);
    let first = cluster * comptime!(t.width as u32);

    let values = base + comptime!(of_x.bytes() as u32);
    let each = comptime!(t.rows() / ROWS_AT_A_TIME / t.warps());
    let mut named = Array::<u32>::new(each);
    #[unroll]
    for i in 0..each {
        named[i] = token(tokens, first, row_of(i, warp, lane, t), length, t);
    }
    let rows = address::<u32>(x) + list * comptime!(t.head_dim as u64 * 2);
    copy_rows(base, rows, &named, warp, lane, of_x, t);
    commit_copies();
    let rows = address::<u32>(value) + list * comptime!(t.value_dim as u64 * 2);
    copy_rows(values, rows, &named, warp, lane, of_values, t);
    commit_copies();
    wait_copies_but(1usize);
    async_fence();
    sync_cube();
    let inverses = base + comptime!(t.inverses());
    let mut row = UNIT_POS_X;
    while row < comptime!(t.rows() as u32) {
        let length = max(square_of(base, row, t), comptime!(SMALLEST_SQUARE)).sqrt();
        shared_store(inverses + row * 4, u32::reinterpret(1.0f32 / length));
        row += comptime!(t.units() as u32);
    }
    own_copies();
    sync_cube();

    let quad = lane % 4 * 2;
    let own = warp % 4 * 16 + lane / 4;
    let x_desc = descriptor(base, 16usize);
    let v_desc = descriptor(values, comptime!(of_values.span_bytes()));
    let shape = comptime!(OutShape {
        value_dim: t.value_dim,
        half: t.half,
        dropout: false,
    });
    let mut tile = warp / 4;
    while tile < comptime!(t.steps() as u32) {
        let mut m0 = f32::new(LOWEST_MAX);
        let mut m1 = f32::new(LOWEST_MAX);
        let mut l0 = f32::new(0.0);
        let mut l1 = f32::new(0.0);
        let mut o = Vector::<f32, O>::zeroed();
        for j in 0..tile + 1 {
            let started = product::<S>(
                x_desc + rows_on(tile),
                x_desc + rows_on(j),
                t.half,
                t.head_dim,
                comptime!(of_x.span_bytes()),
                comptime!(of_x.span_bytes()),
            );
            let at = inverses + j * comptime!(4 * STEP as u32) + quad * 4;
            let products = wait::<S>(started, 0usize, comptime!(STEP / 2));
            let mut s = of_unit_keys::<S>(products, at);
            if j == tile {
                s = hide_later::<S>(s, own, quad, tile == 0);
            }
            let soft = softmax::<S>(s, m0, m1, l0, l1, log2_scale);
            m0 = soft.m0;
            m1 = soft.m1;
            l0 = soft.l0;
            l1 = soft.l1;
            let p = pack_all::<S, P>(soft.p, t.half);
            let started = weigh::<P, O>(p, v_desc + rows_on(j), t.half, t.value_dim);
            let weighed = wait::<O>(started, 0usize, comptime!(t.value_dim / 2));
            o = add_scaled::<O>(o, weighed, soft.a0, soft.a1, t.value_dim);
        }
        let row = tile * comptime!(STEP as u32) + own;
        let upper = out_row(row, asked < count, t);
        let lower = out_row(row + ROW_PAIR, asked < count, t);
        let (top0, top1) = (m0 * log2_scale, m1 * log2_scale);
        let (sum0, sum1) = (quad_sum(l0), quad_sum(l1));
        let one = f32::new(1.0);
        store_row::<O>(out, lse, &o, 0usize, top0, sum0, one, first, &upper, shape);
        store_row::<O>(out, lse, &o, 2usize, top1, sum1, one, first, &lower, shape);
        tile += comptime!(t.warpgroups() as u32);
    }
}

/// The row of the cluster of which the lane copies pieces at its `i`-th turn.
#[cube]
fn row_of(#[comptime] i: usize, warp: u32, lane: u32, #[comptime] t: ClusterTile) -> u32 {
    let turn = comptime!((i * t.warps()) as u32) + warp;
    turn * comptime!(ROWS_AT_A_TIME as u32) + lane_row(lane)
}

/// The row of its list that a row of the cluster is, or [`NOWHERE`].
#[cube]
fn token(tokens: &[i32], first: u32, row: u32, length: u32, #[comptime] t: ClusterTile) -> u32 {
    let last = comptime!(t.width as u32 - 1);
    let token = tokens[(first + min(row, last)) as usize] as u32;
    let exists = row <= last && token < length;
    select(exists, token, comptime!(NOWHERE).runtime())
}

/// Starts to copy the cluster's rows of a list that begins at an address.
#[cube]
fn copy_rows(
    target: u32,
    list: u64,
    named: &Array<u32>,
    warp: u32,
    lane: u32,
    #[comptime] of: Spans,
    #[comptime] t: ClusterTile,
) {
    #[unroll]
    for i in 0..comptime!(t.rows() / ROWS_AT_A_TIME / t.warps()) {
        let stride = comptime!(of.dim as u64 / 8).runtime();
        copy_row(
            target,
            row_of(i, warp, lane, t),
            list,
            named[i],
            stride,
            lane,
            of,
        );
    }
}

/// The square of a row's length.
#[cube]
fn square_of(base: u32, row: u32, #[comptime] t: ClusterTile) -> f32 {
    let of_x = comptime!(t.x());
    let mut sum = 0.0f32;
    #[unroll]
    for piece in 0..comptime!(t.head_dim / 8) {
        let words = load_piece(base, row, piece, of_x);
        #[unroll]
        for i in 0..4usize {
            let low = unpack(words.extract(i), false, t.half);
            let high = unpack(words.extract(i), true, t.half);
            sum += low * low + high * high;
        }
    }
    sum
}

/// What descriptors of rows from a tile on are more than that of the first.
#[cube]
fn rows_on(tile: u32) -> u64 {
    u64::cast_from(tile * comptime!((STEP * ROW) as u32 >> 4))
}

/// Products with keys, of those with rows; the unit's first key is that of the number at `inverses`.
#[cube]
fn of_unit_keys<S: Size>(products: Vector<f32, S>, inverses: u32) -> Vector<f32, S> {
    let mut s = products;
    #[unroll]
    for eight in 0..comptime!(STEP / 8) {
        let two = shared_load_pair(inverses + comptime!(32 * eight as u32));
        #[unroll]
        for i in 0..4usize {
            let at = comptime!(4 * eight + i);
            let inverse = f32::reinterpret(two.extract(comptime!(i % 2)));
            s.insert(at, s.extract(at) * inverse);
        }
    }
    s
}

/// Gives pairs of a tile's rows with keys that are not earlier no weight; but, if it is the first, that of the first row with itself.
#[cube]
fn hide_later<S: Size>(
    s_in: Vector<f32, S>,
    own: u32,
    quad: u32,
    is_first: bool,
) -> Vector<f32, S> {
    let mut s = s_in;
    let infinity = f32::new(f32::NEG_INFINITY);
    // A first row sees itself, as if it were the next one.
    let upper = own + select(is_first && own == 0, 1u32, 0u32);
    let lower = own + ROW_PAIR;
    #[unroll]
    for eight in 0..comptime!(STEP / 8) {
        #[unroll]
        for i in 0..2usize {
            let key = quad + comptime!((8 * eight + i) as u32);
            let at = comptime!(4 * eight + i);
            s.insert(at, select(key < upper, s.extract(at), infinity));
            let at = comptime!(at + 2);
            s.insert(at, select(key < lower, s.extract(at), infinity));
        }
    }
    s
}

#[cube]
fn out_row(row: u32, exists: bool, #[comptime] t: ClusterTile) -> OutRow {
    OutRow {
        position: row,
        exists: exists && row < comptime!(t.width as u32),
    }
}
