//! The softmaxes of a cube as one.

// A kernel's integers have no such method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use crate::kernels::paged::page_list::{Share, Sizes, cube_of};
use blocksparse_cubecl::shared::score::{LOW, LOWEST_MAX};

/// Softmaxes of a cube in shared memory: `outs` `[parts, rows, width]`, `tops` and `totals` `[parts, rows]`.
#[derive(CubeType)]
pub struct Parts<A: Float> {
    pub outs: Shared<[A]>,
    pub tops: Shared<[A]>,
    pub totals: Shared<[A]>,
}

/// Room for as many `parts` of `rows` queries with values of `width` numbers, as `shape` says; the last are units of the cube.
#[cube]
pub fn room_for<A: Float>(#[comptime] shape: [usize; 4]) -> Parts<A> {
    let rows = comptime!(shape[0] * shape[1]);
    Parts::<A> {
        outs: Shared::<[A]>::new_slice(comptime!(rows * shape[2])),
        tops: Shared::<[A]>::new_slice(rows),
        totals: Shared::<[A]>::new_slice(rows),
    }
}

/// What shares leave: outputs `[items, shared_heads, group_rows, value_width]`, and the lse of each, behind which come the first share and the number of
/// shares of each page list.
#[derive(CubeType, CubeLaunch)]
pub struct ShareOuts<A: Float> {
    pub partial: Box<[A]>,
    pub stats: Box<[A]>,
}

/// `out = Σ_x exp(top_x − top) out_x / total`, `lse = top + ln total`, of parts in order.
#[cube]
pub fn join_parts<A: Float>(
    of: &Parts<A>,
    to: &mut ShareOuts<A>,
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
                top = top.max(of.tops[part * rows + row]);
            }
            let mut total = A::new(0.0);
            let mut sum = A::new(0.0);
            #[unroll]
            for part in 0..parts {
                let weight = (of.tops[part * rows + row] - top).exp();
                total += weight * of.totals[part * rows + row];
                sum += weight * of.outs[part * comptime!(rows * width) + at];
            }
            let is_one = total > A::new(0.0);
            let divisor = select(is_one, total, A::new(1.0));
            to.partial[first * width + at] = sum / divisor;
            if at % width == 0 {
                to.stats[first + row] = select(is_one, top + divisor.ln(), A::new(LOW));
            }
        }
        at += comptime!(shape[3]);
    }
    let is_first = cube.block == 0 && cube.shared_head == 0 && cube.item == share.first_item;
    if unit == 0 && is_first {
        to.stats[sizes.info + 2 * share.page_list] = A::cast_from(share.first_item);
        to.stats[sizes.info + 2 * share.page_list + 1] = A::cast_from(share.items);
    }
}
