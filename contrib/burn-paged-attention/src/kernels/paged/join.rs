//! The softmaxes of a cube as one.

// A kernel's integers have no such method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::paged::page_list::{Share, Sizes};
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX};

/// Which cube of a share this is.
#[derive(CubeType, Clone, Copy)]
pub struct Cube {
    /// The share.
    pub item: usize,
    /// Which of the heads that share an entry of the table.
    pub shared_head: usize,
    /// Which part of the queries.
    pub block: usize,
}

/// Where this cube is in a launch: queries change first, then heads, so that neighbours read the same pages.
#[cube]
pub fn cube_of(sizes: &Sizes) -> Cube {
    Cube {
        item: CUBE_POS / sizes.row_blocks / sizes.shared_heads,
        shared_head: CUBE_POS / sizes.row_blocks % sizes.shared_heads,
        block: CUBE_POS % sizes.row_blocks,
    }
}

/// `out = Σ_x exp(top_x − top) out_x / total`, `lse = top + ln total`, of as many `parts` of `rows` queries with values of `width` numbers, in order.
/// `shape` is these and the units of the cube.
///
/// `outs` `[parts, rows, width]`, `tops` and `totals` `[parts, rows]`.
#[cube]
pub fn join_parts<A: Float>(
    outs: &[A],
    tops: &[A],
    totals: &[A],
    partial: &mut [A],
    stats: &mut [A],
    share: &Share,
    sizes: &Sizes,
    #[comptime] shape: [usize; 4],
) {
    let parts = comptime!(shape[0]);
    let rows = comptime!(shape[1]);
    let width = comptime!(shape[2]);
    let cube = cube_of(sizes);
    let first_row = cube.block * rows;
    let first = (cube.item * sizes.shared_heads + cube.shared_head) * sizes.group_rows + first_row;
    let unit = UNIT_POS as usize;
    let mut at = unit;
    while at < comptime!(rows * width) {
        let row = at / width;
        if first_row + row < sizes.group_rows {
            let mut top = A::new(LOWEST_MAX);
            #[unroll]
            for part in 0..parts {
                top = top.max(tops[part * rows + row]);
            }
            let mut total = A::new(0.0);
            let mut sum = A::new(0.0);
            #[unroll]
            for part in 0..parts {
                let weight = (tops[part * rows + row] - top).exp();
                total += weight * totals[part * rows + row];
                sum += weight * outs[part * comptime!(rows * width) + at];
            }
            let is_one = total > A::new(0.0);
            let divisor = select(is_one, total, A::new(1.0));
            partial[first * width + at] = sum / divisor;
            if at % width == 0 {
                stats[first + row] = select(is_one, top + divisor.ln(), A::new(LOW));
            }
        }
        at += comptime!(shape[3]);
    }
    let is_first = cube.block == 0 && cube.shared_head == 0 && cube.item == share.first_item;
    if unit == 0 && is_first {
        stats[sizes.info + 2 * share.page_list] = A::cast_from(share.first_item);
        stats[sizes.info + 2 * share.page_list + 1] = A::cast_from(share.items);
    }
}
