//! The two products of attention.

use cubecl::prelude::*;

use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::Four;

/// Returns the offset of a lane's row of the four matrices of a left operand.
#[cube]
pub fn lane_rows(lane: u32, #[comptime] dim: usize, #[comptime] t: Tile) -> u32 {
    lane % 16 * comptime!(t.pitch(dim) as u32) + lane / 16 * 16
}

/// Returns the offset of a lane's row of the four matrices of a right operand.
#[cube]
pub fn lane_cols(lane: u32, #[comptime] dim: usize, #[comptime] t: Tile) -> u32 {
    (lane % 8 + lane / 16 * 8) * comptime!(t.pitch(dim) as u32) + lane / 8 % 2 * 16
}

/// Returns the offset from which a lane reads the right operand of `accumulate`: rows of matrices to transpose, or single elements in tf32.
#[cube]
pub fn lane_depth(lane: u32, #[comptime] dim: usize, #[comptime] t: Tile) -> u32 {
    let mut start = lane_rows(lane, dim, t);
    if comptime!(t.element == Element::Tf32) {
        start = lane % 4 * comptime!(2 * t.pitch(dim) as u32) + lane / 4 * 4;
    }
    start
}

/// Loads the left operands of a warp's rows from shared memory.
#[cube]
pub fn load_left(
    a: u32,
    left: &mut Array<Vector<u32, Four>>,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let depth = comptime!(t.depth(dim));
    #[unroll]
    for k in 0..depth {
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            let rows = load_matrices(a, comptime!(m * 16 * t.pitch(dim) + k * 32));
            left[comptime!(m * depth + k)] = operand(rows, t.element);
        }
    }
}

/// Computes `a · bᵀ` of a warp's rows and the columns of a step. With `kept`, the rows are in registers (`left`).
#[cube]
pub fn product(
    a: u32,
    left: &Array<Vector<u32, Four>>,
    b: u32,
    #[comptime] kept: bool,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) -> Array<Vector<f32, Four>> {
    let eights = comptime!(t.eights());
    let depth = comptime!(t.depth(dim));
    let mut s = Array::<Vector<f32, Four>>::new(comptime!(t.warp_tiles * eights));
    #[unroll]
    for i in 0..comptime!(t.warp_tiles * eights) {
        s[i] = Vector::<f32, Four>::zeroed();
    }
    #[unroll]
    for k in 0..depth {
        let mut rows = Array::<Vector<u32, Four>>::new(t.warp_tiles);
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            if comptime!(kept) {
                rows[m] = left[comptime!(m * depth + k)];
            } else {
                let loaded = load_matrices(a, comptime!(m * 16 * t.pitch(dim) + k * 32));
                rows[m] = operand(loaded, t.element);
            }
        }
        #[unroll]
        for n in 0..comptime!(eights / 2) {
            let right = load_matrices(b, comptime!(n * 16 * t.pitch(dim) + k * 32));
            let right = operand(right, t.element);
            #[unroll]
            for m in 0..comptime!(t.warp_tiles) {
                let at = comptime!(m * eights + 2 * n);
                s[at] = multiply(
                    rows[m],
                    right.extract(0usize),
                    right.extract(1usize),
                    s[at],
                    t.element,
                );
                let at = comptime!(at + 1);
                s[at] = multiply(
                    rows[m],
                    right.extract(2usize),
                    right.extract(3usize),
                    s[at],
                    t.element,
                );
            }
        }
    }
    s
}

/// Adds `p · b` to `o`, with left operands in registers and the rows of a step in shared memory.
///
/// In tf32, a lane's columns of p are two neighbours, where mma.sync expects one of the first and one of the second half of eight. So the rows of b are
/// read in the same changed order.
#[cube]
pub fn accumulate(
    p: &Array<Vector<u32, Four>>,
    b: u32,
    o: &mut Array<Vector<f32, Four>>,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let depth = comptime!(t.depth(t.cols));
    let eights = comptime!(dim / 8);
    #[unroll]
    for k in 0..depth {
        #[unroll]
        for n in 0..comptime!(eights.div_ceil(2)) {
            let mut right = Vector::<u32, Four>::zeroed();
            if comptime!(t.element == Element::Tf32) {
                #[unroll]
                for i in 0..4usize {
                    let offset =
                        comptime!(((8 * k + i % 2) * t.pitch(dim) + (2 * n + i / 2) * 32) as u32);
                    right.insert(i, round(shared_load(b + offset)));
                }
            } else {
                right = load_transposes(b, comptime!(k * 16 * t.pitch(dim) + n * 32));
            }
            #[unroll]
            for m in 0..comptime!(t.warp_tiles) {
                let at = comptime!(m * eights + 2 * n);
                let left = p[comptime!(m * depth + k)];
                o[at] = multiply(
                    left,
                    right.extract(0usize),
                    right.extract(1usize),
                    o[at],
                    t.element,
                );
                // Widths that are not a multiple of 16 end with a single group of eight.
                if comptime!(2 * n + 1 < eights) {
                    let at = comptime!(at + 1);
                    o[at] = multiply(
                        left,
                        right.extract(2usize),
                        right.extract(3usize),
                        o[at],
                        t.element,
                    );
                }
            }
        }
    }
}

/// Packs weights as left operands. The sums of a product are distributed over lanes as the left operand of another.
#[cube]
pub fn pack_left(s: &Array<Vector<f32, Four>>, #[comptime] t: Tile) -> Array<Vector<u32, Four>> {
    let depth = comptime!(t.depth(t.cols));
    let mut p = Array::<Vector<u32, Four>>::new(comptime!(t.warp_tiles * depth));
    #[unroll]
    for m in 0..comptime!(t.warp_tiles) {
        #[unroll]
        for k in 0..depth {
            let mut four = Vector::<u32, Four>::zeroed();
            if comptime!(t.element == Element::Tf32) {
                let own = s[comptime!(m * depth + k)];
                #[unroll]
                for i in 0..4usize {
                    four.insert(i, round(bits_of(own.extract(comptime!(i % 2 * 2 + i / 2)))));
                }
            } else {
                #[unroll]
                for i in 0..2usize {
                    let pair = s[comptime!(m * t.eights() + 2 * k + i)];
                    let half = comptime!(t.element.half());
                    four.insert(comptime!(2 * i), pack_at::<Four>(&pair, 0usize, half));
                    four.insert(comptime!(2 * i + 1), pack_at::<Four>(&pair, 2usize, half));
                }
            }
            p[comptime!(m * depth + k)] = four;
        }
    }
    p
}
