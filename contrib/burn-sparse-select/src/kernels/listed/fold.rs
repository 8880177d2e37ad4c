//! The sums of the parts of gradients by keys and values, where a block's list has several.

use cubecl::prelude::*;

use crate::kernels::listed::keys::{ListShape, list_count, queries_of};
use blocksparse_cubecl::arch::ptx::{pack, unpack};
use blocksparse_cubecl::mma::tile::Tile;
use blocksparse_cubecl::shared::addressing::{Slice, batch_of, head_of};

/// Adds the parts of a cube's keys, in order, to their gradients. As [`keys`](crate::kernels::listed::keys::keys) has them.
#[cube(launch_unchecked)]
pub fn fold(
    partial: &[f32],
    tile_blocks: &[i32],
    grad_k: &mut [u32],
    grad_v: &mut [u32],
    slice: Slice,
    seq_kv: u32,
    tiles: u32,
    scale: f32,
    #[comptime] shape: ListShape,
    #[comptime] t: Tile,
) {
    let list = (batch_of(&slice) * slice.heads + head_of(&slice)) as u32;
    let first_key = CUBE_POS_X * comptime!(t.rows() as u32);
    let parts = queries_of(tile_blocks, list, tiles, first_key, shape, t).parts;
    if parts > 1u32 {
        let between = list_count(&slice) * seq_kv;
        let first = list * seq_kv + first_key;
        let rows = min(comptime!(t.rows() as u32).runtime(), seq_kv - first_key);
        add(
            partial,
            grad_k,
            first,
            between,
            rows,
            parts,
            scale,
            0usize,
            comptime!(t.head_dim),
            t,
        );
        add(
            partial,
            grad_v,
            first,
            between,
            rows,
            parts,
            f32::new(1.0),
            comptime!(t.head_dim),
            comptime!(t.value_dim),
            t,
        );
    }
}

/// Adds the parts of rows from number `column` on, times a factor; parts are `between` rows apart.
#[cube]
fn add(
    partial: &[f32],
    grad: &mut [u32],
    first: u32,
    between: u32,
    rows: u32,
    parts: u32,
    factor: f32,
    #[comptime] column: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let half = comptime!(t.element.half());
    let words = comptime!(dim as u32 / 2);
    let mut index = UNIT_POS_X;
    while index < rows * words {
        let row = first + index / words;
        let number = index % words * 2;
        let mut low = f32::new(0.0);
        let mut high = f32::new(0.0);
        for part in 0..parts {
            let at = (part * between + row) as usize * comptime!(t.head_dim + t.value_dim)
                + comptime!(column)
                + number as usize;
            low += partial[at];
            high += partial[at + 1];
        }
        let at = (row * words + index % words) as usize;
        let there = grad[at];
        grad[at] = pack(
            low * factor + unpack(there, false, half),
            high * factor + unpack(there, true, half),
            half,
        );
        index += comptime!(t.units() as u32);
    }
}
