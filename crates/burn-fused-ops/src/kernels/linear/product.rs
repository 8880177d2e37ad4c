//! The kernel: persistent cubes with one warp that loads and two warpgroups that multiply.
//!
//! ```text
//! warp 8       slab after slab of tile after tile into a ring of slabs, by TMA
//! warpgroups   64 rows of a tile each: slab after slab, then the sums are written while the other warpgroup may still multiply, and the
//!              next tile's slabs are on their way
//! ```

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use crate::kernels::linear::asm::{main_loop, pause};
use crate::kernels::linear::epilogue::{Lane, Place, ResultShape, finish, prepare};
use crate::kernels::linear::highest::store_highest;
use crate::kernels::linear::line_sums::{is_wanted, store_line_sums};
use crate::kernels::linear::log_sums::{Seen, seen_place, store_log_sums};
use crate::kernels::linear::maxima::store_maxima;
use crate::kernels::linear::places::Tiles;
use crate::kernels::linear::tile::{
    MULTIPLIERS, Order, ProductTile, ROWS, SLAB, SPAN_BYTES, STAGGER, WARPS,
};
use crate::kernels::linear::view::HEAD;
use blocksparse_cubecl::arch::ptx::{shared_address, uniform};
use blocksparse_cubecl::arch::tma::{
    ROW_ELEMENTS, barrier_expect, barrier_wait, descriptor, load_box, ring_init,
};

/// Loads a slab of a factor: `width` of its rows (or columns), from `across` on.
#[cube]
fn load_slab(
    map: u64,
    target: u32,
    bar: u32,
    across: u32,
    depth: u32,
    matrix: u32,
    run: u32,
    #[comptime] order: Order,
    #[comptime] width: usize,
) {
    let (within, run) = (matrix % run, matrix / run);
    if comptime!(order == Order::Depth) {
        load_box(map, target, bar, depth, across, within, run);
    } else {
        #[unroll]
        for span in 0..comptime!((width / ROW_ELEMENTS) as u32) {
            let target = target + comptime!(span * SPAN_BYTES as u32);
            let column = across + comptime!(span * ROW_ELEMENTS as u32);
            load_box(map, target, bar, column, depth, within, run);
        }
    }
}

/// Loads a slab of a factor laid out by heads. A slab does not cross a batch entry.
#[cube]
fn load_heads(
    map: u64,
    target: u32,
    bar: u32,
    across: u32,
    depth: u32,
    seq: u32,
    #[comptime] order: Order,
    #[comptime] width: usize,
) {
    if comptime!(order == Order::Depth) {
        let (row, head) = (across % seq, depth / comptime!(HEAD as u32));
        load_box(map, target, bar, 0u32, row, head, across / seq);
    } else {
        #[unroll]
        for span in 0..comptime!((width / ROW_ELEMENTS) as u32) {
            let (target, row) = (target + comptime!(span * SPAN_BYTES as u32), depth % seq);
            let head = across / comptime!(HEAD as u32) + span;
            load_box(map, target, bar, 0u32, row, head, depth / seq);
        }
    }
}

/// Computes a product. `a` and `b` are maps `[1, batch, rows, columns]` with contiguous columns, transposed where an [`Order`] says so; `a` is a map
/// `[batch, heads, seq, 64]` if the tile says so. `out` is `[batch, parts, rows, columns]` in words, or what the epilogue states. `second` is its second
/// output and `before` its additional input, in the same layout; `totals` is `[tiles along the rows · 2, columns]`. `seen` is read only if the epilogue
/// restricts columns. For line sums `bias` holds the rows' logarithms, `[batch, rows]`.
#[cube(launch_unchecked)]
pub fn product<S: Size, W: Size>(
    a: &TensorMap<u32, Tiled>,
    b: &TensorMap<u32, Tiled>,
    out: &mut [Vector<u32, W>],
    second: ComptimeOption<Box<[Vector<u32, W>]>>,
    bias: ComptimeOption<Box<[Vector<f32, W>]>>,
    before: ComptimeOption<Box<[Vector<u32, W>]>>,
    totals: ComptimeOption<Box<[f32]>>,
    tiles: Tiles,
    shape: ResultShape,
    seen: Seen,
    #[comptime] t: ProductTile,
) {
    let mut second = second;
    let mut totals = totals;
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let stages = comptime!(t.stages as u32);
    if UNIT_POS_X == 0 {
        let full = base + comptime!(t.full());
        ring_init(
            full,
            base + comptime!(t.empty()),
            comptime!(stages as usize),
            WARPS,
        );
    }
    sync_cube();

    let slabs = base + comptime!(t.slabs());
    if warp == comptime!((MULTIPLIERS / 32) as u32) {
        if lane == 0 {
            let a_map = tensor_map_address(a);
            let b_map = tensor_map_address(b);
            let mut number = 0u32;
            let mut tile = CUBE_POS_X;
            while tile < tiles.count {
                let place = seen_place(&tiles, &seen, &shape, tile, t);
                let mut count = place.count;
                if comptime!(t.is_lines()) {
                    count = select(is_wanted::<W>(&bias, &place, &shape), count, 0u32);
                }
                for slab in 0..count {
                    let stage = number % stages;
                    let bar = base + stage * 8;
                    barrier_wait(bar + comptime!(t.empty()), 1 - ((number / stages) & 1));
                    barrier_expect(bar, comptime!(t.slab_bytes()));
                    let depth = (place.first + slab) * comptime!(SLAB as u32);
                    let target = slabs + stage * comptime!(t.slab_bytes() as u32);
                    if comptime!(t.by_heads) {
                        load_heads(a_map, target, bar, place.row, depth, tiles.seq, t.a, ROWS);
                    } else {
                        load_slab(
                            a_map,
                            target,
                            bar,
                            place.row,
                            depth,
                            place.batch / tiles.a_each,
                            tiles.a_run,
                            t.a,
                            ROWS,
                        );
                    }
                    load_slab(
                        b_map,
                        target + comptime!(t.a_bytes() as u32),
                        bar,
                        place.col,
                        depth,
                        place.batch / tiles.b_each,
                        tiles.b_run,
                        t.b,
                        t.cols,
                    );
                    number += 1;
                }
                tile += CUBE_COUNT_X;
            }
        }
    } else {
        let group = warp / 4;
        let a_desc = descriptor(slabs + group * comptime!(SPAN_BYTES as u32), SPAN_BYTES);
        let b_desc = descriptor(slabs + comptime!(t.a_bytes() as u32), SPAN_BYTES);
        let lead = select(lane == 0, 1u32, 0u32);
        let own = Lane {
            unit: UNIT_POS_X,
            warp,
            lane,
        };
        // A cube without a tile must not wait for a slab that never arrives.
        if comptime!(!t.is_lines()) {
            if group == 1 && CUBE_POS_X < tiles.count {
                barrier_wait(base, 0u32);
                pause(STAGGER);
            }
        }
        let mut number = 0u32;
        let mut tile = CUBE_POS_X;
        while tile < tiles.count {
            let place = seen_place(&tiles, &seen, &shape, tile, t);
            let held = prepare::<W>(&before, &place, &shape, &own, t);
            let mut wanted = 1u32.runtime();
            if comptime!(t.is_lines()) {
                wanted = uniform(select(is_wanted::<W>(&bias, &place, &shape), 1u32, 0u32));
                // Stagger once, at the first tile that is wanted.
                if wanted != 0u32 && group == 1 && number == 0 {
                    barrier_wait(base, 0u32);
                    pause(STAGGER);
                }
            }
            if wanted != 0u32 {
                let of = comptime!(t.main_loop());
                let sums = main_loop::<S>(a_desc, b_desc, base, number, place.count, lead, of);
                number += place.count;
                if comptime!(t.is_lines()) {
                    store_line_sums::<S, W>(
                        out, &bias, &sums, &place, &shape, &seen, &own, base, t,
                    );
                } else if comptime!(t.is_highest()) {
                    store_highest::<S, W>(out, &sums, &place, &shape, &seen, &own, t);
                } else if comptime!(t.is_maxima()) {
                    store_maxima::<S, W>(out, &sums, &place, &shape, &own, t);
                } else if comptime!(t.is_seen()) {
                    store_log_sums::<S, W>(out, &sums, &place, &shape, &seen, &own, t);
                } else if comptime!(t.wide) {
                    store::<S, W>(out, &sums, &place, &shape, &own, t);
                } else {
                    finish::<S, W>(
                        &sums,
                        out,
                        &mut second,
                        &bias,
                        &held,
                        &mut totals,
                        &place,
                        &shape,
                        &own,
                        base,
                        t,
                    );
                }
            }
            tile += CUBE_COUNT_X;
        }
    }
}

/// Writes sums unchanged.
#[cube]
fn store<S: Size, W: Size>(
    out: &mut [Vector<u32, W>],
    sums: &Vector<f32, S>,
    place: &Place,
    shape: &ResultShape,
    own: &Lane,
    #[comptime] t: ProductTile,
) {
    #[unroll]
    for lower in 0..2usize {
        let row = place.row + own.row() + comptime!(8 * lower as u32);
        let at = (place.matrix * shape.rows + row) as usize * (shape.cols / 2) as usize;
        let end = select(row < shape.rows, shape.cols, 0u32);
        #[unroll]
        for eight in 0..comptime!(t.cols / 8) {
            let col = place.col + comptime!(8 * eight as u32) + own.lane % 4 * 2;
            let mut words = Vector::<u32, W>::zeroed();
            let n = comptime!(4 * eight + 2 * lower);
            words.insert(0usize, u32::reinterpret(sums.extract(n)));
            words.insert(1usize, u32::reinterpret(sums.extract(comptime!(n + 1))));
            if col < end {
                out[at + (col / 2) as usize] = words;
            }
        }
    }
}
