//! The kernel: persistent cubes with one warp that loads and two warpgroups that multiply, as in [`linear`](crate::kernels::linear).

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use crate::kernels::linear::asm::main_loop;
use crate::kernels::linear::blocks::tables::{GROUP, NONE};
use crate::kernels::linear::blocks::tile::{BlockTile, LEFT_BYTES, Split, Work};
use crate::kernels::linear::epilogue::{Lane, as_stored};
use crate::kernels::linear::tile::{MULTIPLIERS, SLAB, WARPS};
use blocksparse_cubecl::arch::ptx::{pack_at, shared_address, trade_four, transpose, uniform};
use blocksparse_cubecl::arch::tma::{
    barrier_expect, barrier_fence, barrier_init, barrier_wait, descriptor, descriptor_of, load_box,
};

/// Tiles of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct BlockTiles {
    /// Number of tiles.
    count: u32,
    /// Tiles with different gather lists: groups of outputs, or tiles of the weight.
    lists: u32,
    /// Rows and columns of the result of a gathered product.
    rows: u32,
    cols: u32,
    /// For the gradient with respect to the weight: slabs of a part of the rows, and elements of a part's result.
    part_slabs: u32,
    numbers: u32,
}

/// Position of a tile.
#[derive(CubeType, Clone, Copy)]
struct Place {
    list: u32,
    /// Index of the tile's rows, or of its part of the rows.
    other: u32,
    /// The first of its packed slabs.
    first: u32,
    count: u32,
}

/// Returns the tile's first group of 64 outputs.
#[cube]
fn group_of(list: u32, #[comptime] t: BlockTile) -> u32 {
    if comptime!(t.split == Split::Left) {
        list * 2
    } else {
        list
    }
}

#[cube]
fn place_of(tiles: &BlockTiles, tile: u32, starts: &[u32], #[comptime] t: BlockTile) -> Place {
    let list = tile % tiles.lists;
    let other = tile / tiles.lists;
    let mut first = 0u32;
    let mut count = tiles.part_slabs;
    if comptime!(matches!(t.work, Work::Gathered(_))) {
        let group = group_of(list, t) as usize;
        first = starts[group];
        count = starts[group + 1] - first;
    }
    Place {
        list,
        other,
        first,
        count,
    }
}

/// Loads a slab of a gathered product.
#[cube]
fn load_gathered(
    a: u64,
    b: u64,
    target: u32,
    bar: u32,
    entries: &Array<u32>,
    slab: u32,
    second: u32,
    row: u32,
    #[comptime] t: BlockTile,
) {
    #[unroll]
    for left in 0..comptime!(t.lefts()) {
        load_box(
            a,
            target + comptime!((left * LEFT_BYTES) as u32),
            bar,
            0u32,
            (if comptime!(left == 0) { slab } else { second }) * comptime!(SLAB as u32),
            0u32,
            0u32,
        );
    }
    #[unroll]
    for right in 0..comptime!(t.rights()) {
        #[unroll]
        for i in 0..comptime!(t.boxes()) {
            load_box(
                b,
                target
                    + comptime!(t.right() + (right * t.right_bytes() + i * t.box_bytes()) as u32),
                bar,
                entries[i],
                row + comptime!((right * t.cols) as u32),
                0u32,
                0u32,
            );
        }
    }
}

/// Loads a slab of the gradient with respect to the weight: 64 rows.
#[cube]
fn load_rows(
    a: u64,
    b: u64,
    target: u32,
    bar: u32,
    start: u32,
    entries: &Array<u32>,
    row: u32,
    #[comptime] t: BlockTile,
) {
    #[unroll]
    for left in 0..comptime!(t.lefts()) {
        let column = comptime!(if t.split == Split::Left {
            (left * GROUP) as u32
        } else {
            0u32
        });
        load_box(
            a,
            target + comptime!((left * LEFT_BYTES) as u32),
            bar,
            start + column,
            row,
            0u32,
            0u32,
        );
    }
    #[unroll]
    for right in 0..comptime!(t.rights()) {
        #[unroll]
        for i in 0..comptime!(t.boxes()) {
            load_box(
                b,
                target
                    + comptime!(t.right() + (right * t.right_bytes() + i * t.box_bytes()) as u32),
                bar,
                entries[comptime!(right * t.boxes() + i)],
                row,
                0u32,
                0u32,
            );
        }
    }
}

/// Computes a product. `a` and `b` are maps `[1, 1, rows, columns]`, and `entries` holds columns of `b`. For a gathered product, `a` is the packed weight,
/// `[slabs · 64, 64]`, `b` the matrix it is multiplied with, `starts` the slab offset of each group, and `out` is `[rows, columns]` in words. For the
/// gradient with respect to the weight, `a` is x, `b` the gradient with respect to the result, `starts` the first input of each tile, and `out` is
/// `[parts, elements]`.
#[cube(launch_unchecked)]
pub fn product<S: Size, W: Size>(
    a: &TensorMap<u32, Tiled>,
    b: &TensorMap<u32, Tiled>,
    out: &mut [Vector<u32, W>],
    starts: &[u32],
    entries: &[u32],
    targets: ComptimeOption<Box<[u32]>>,
    tiles: BlockTiles,
    #[comptime] t: BlockTile,
) {
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let stages = comptime!(t.stages as u32);
    if UNIT_POS_X == 0 {
        #[unroll]
        for i in 0..stages {
            barrier_init(base + comptime!(8 * i), 1u32);
            barrier_init(base + comptime!(t.empty() + 8 * i), WARPS);
        }
        barrier_fence();
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
                let place = place_of(&tiles, tile, starts, t);
                let mut columns = Array::<u32>::new(comptime!(t.entries()));
                let mut start = 0u32;
                let mut ahead = 0u32;
                if comptime!(t.work == Work::Weight) {
                    start = starts[place.list as usize];
                    #[unroll]
                    for i in 0..comptime!(t.entries()) {
                        columns[i] = entries[place.list as usize * comptime!(t.entries()) + i];
                    }
                } else {
                    // Distance from the first warpgroup's slab to the second one's.
                    if comptime!(t.split == Split::Left) {
                        ahead = place.count;
                    }
                }
                for slab in 0..place.count {
                    let stage = number % stages;
                    let bar = base + stage * 8;
                    let at = place.first + slab;
                    if comptime!(t.work != Work::Weight) {
                        // Read before the wait, which hides the latency.
                        #[unroll]
                        for i in 0..comptime!(t.entries()) {
                            columns[i] = entries[at as usize * comptime!(t.entries()) + i];
                        }
                    }
                    barrier_wait(bar + comptime!(t.empty()), 1 - ((number / stages) & 1));
                    barrier_expect(bar, comptime!(t.slab_bytes()));
                    let target = slabs + stage * comptime!(t.slab_bytes() as u32);
                    if comptime!(t.work == Work::Weight) {
                        let row = (place.other * tiles.part_slabs + slab) * comptime!(SLAB as u32);
                        load_rows(a_map, b_map, target, bar, start, &columns, row, t);
                    } else {
                        let row = place.other * comptime!((t.rights() * t.cols) as u32);
                        load_gathered(a_map, b_map, target, bar, &columns, at, at + ahead, row, t);
                    }
                    number += 1;
                }
                tile += CUBE_COUNT_X;
            }
        }
    } else {
        let group = warp / 4;
        let left = comptime!(if t.lefts() == 2 {
            LEFT_BYTES as u32
        } else {
            0u32
        });
        let right = comptime!(if t.rights() == 2 {
            t.right_bytes() as u32
        } else {
            0u32
        });
        // One span of 64 rows or columns.
        let a_desc = descriptor(slabs + group * left, LEFT_BYTES);
        let b_desc = descriptor_of(
            slabs + comptime!(t.right()) + group * right,
            comptime!(t.box_bytes()),
            comptime!(t.right_row()),
        );
        let lead = select(lane == 0, 1u32, 0u32);
        let own = Lane {
            unit: UNIT_POS_X,
            warp,
            lane,
        };
        let mut number = 0u32;
        let mut tile = CUBE_POS_X;
        while tile < tiles.count {
            let place = place_of(&tiles, tile, starts, t);
            let of = comptime!(t.main_loop());
            let sums = main_loop::<S>(a_desc, b_desc, base, number, place.count, lead, of);
            number += place.count;
            if comptime!(t.work == Work::Weight) {
                store_blocks::<S, W>(out, &sums, &targets, &place, &tiles, &own, t);
            } else {
                store_rows::<S, W>(out, &sums, &place, &tiles, &own, t);
            }
            tile += CUBE_COUNT_X;
        }
    }
}

/// Writes `[64 outputs, rows]` as `[rows, outputs]`, rounded. A warp has 16 outputs: units exchange, so that each has eight outputs of a row at a time.
#[cube]
fn store_rows<S: Size, W: Size>(
    out: &mut [Vector<u32, W>],
    sums: &Vector<f32, S>,
    place: &Place,
    tiles: &BlockTiles,
    own: &Lane,
    #[comptime] t: BlockTile,
) {
    let lane = own.lane;
    let group = own.warp / 4;
    let mut first = place.other * comptime!((t.rights() * t.cols) as u32);
    let mut outputs = group_of(place.list, t);
    if comptime!(t.split == Split::Left) {
        outputs += group;
    } else {
        first += group * comptime!(t.cols as u32);
    }
    let col = outputs * comptime!(GROUP as u32) + own.warp % 4 * 16 + lane % 2 * 8;
    #[unroll]
    for sixteen in 0..comptime!(t.cols / 16) {
        let mut words = Vector::<u32, Const<4>>::zeroed();
        #[unroll]
        for i in 0..4usize {
            let n = comptime!(4 * (2 * sixteen + i / 2) + 2 * (i % 2));
            words.insert(i, transpose(pack_at::<S>(sums, n, t.half)));
        }
        let four = trade_four(words, lane);
        let row = first + comptime!(16 * sixteen as u32) + lane % 4 / 2 * 8 + lane / 4;
        if row < tiles.rows && col < tiles.cols {
            out[(row * (tiles.cols / 8) + col / 8) as usize] = as_stored::<W>(&four);
        }
    }
}

/// Writes the elements of kept blocks unchanged.
#[cube]
fn store_blocks<S: Size, W: Size>(
    out: &mut [Vector<u32, W>],
    sums: &Vector<f32, S>,
    targets: &ComptimeOption<Box<[u32]>>,
    place: &Place,
    tiles: &BlockTiles,
    own: &Lane,
    #[comptime] t: BlockTile,
) {
    let cell = comptime!(t.cell as u32);
    let group = own.warp / 4;
    #[comptime]
    match targets {
        ComptimeOption::Some(targets) => {
            let lists = (place.list * 2 + group) as usize * comptime!(t.boxes() * t.side());
            #[unroll]
            for entry in 0..comptime!(t.boxes()) {
                #[unroll]
                for lower in 0..2usize {
                    let input = own.warp % 4 * 16 + own.lane / 4 + comptime!(8 * lower as u32);
                    let target =
                        targets[lists + comptime!(entry * t.side()) + (input / cell) as usize];
                    if target != NONE {
                        let at = place.other * tiles.numbers
                            + target
                            + input % cell * comptime!(t.block as u32)
                            + own.lane % 4 * 2;
                        #[unroll]
                        for eight in 0..comptime!(t.cell / 8) {
                            let n = comptime!(4 * (entry * t.cell / 8 + eight) + 2 * lower);
                            let mut words = Vector::<u32, W>::zeroed();
                            words.insert(0usize, u32::reinterpret(sums.extract(n)));
                            words.insert(1usize, u32::reinterpret(sums.extract(comptime!(n + 1))));
                            out[(at / 2) as usize + comptime!(4 * eight)] = words;
                        }
                    }
                }
            }
        }
        ComptimeOption::None => {}
    }
}
