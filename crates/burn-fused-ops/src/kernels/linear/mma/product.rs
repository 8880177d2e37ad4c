//! The kernel: persistent cubes in which all warps copy and multiply.
//!
//! ```text
//! slabs       64 of the depth, in a ring; a slab is copied while those before it are multiplied, also into the next tile
//! a warp      64 × 64 or 64 × 32 sums in registers; the operands of the next 16 of the depth are read while these are multiplied
//! once a slab the copies of the next one are waited for, and all warps have read this one: then its place is copied to
//! ```

// Comptime conditions stay separate from runtime conditions.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use crate::kernels::linear::epilogue::as_stored;
use crate::kernels::linear::mma::places::{below, beside, lane_place, piece_at};
use crate::kernels::linear::mma::tile::{MmaTile, PIECE, PIECE_NUMBERS, STEPS, WARP_ROWS};
use crate::kernels::linear::places::{Tiles, place_of};
use crate::kernels::linear::tile::{Order, ROWS, SLAB};
use blocksparse_cubecl::arch::ptx::{
    global_address, pack_at, shared_address, trade_four, uniform, val,
};
use blocksparse_cubecl::arch::sm80::{
    Element, commit_copies, load_matrices, load_transposes, multiply, wait_copies_but,
};
use blocksparse_cubecl::shared::addressing::Four;

/// Factor in memory.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Factor {
    /// Elements across the depth.
    across: u32,
    /// Stride of the dimension that is not contiguous, in bytes.
    pitch: u32,
    /// Stride between matrices of a run, in pieces of 16 bytes.
    batch: u32,
    /// Matrices of a run, and the stride between runs in pieces.
    run: u32,
    outer: u32,
}

/// Returns the PTX of a copy; missing bytes become zero. If pieces are whole or missing, the copy is predicated; a byte count costs six more instructions.
fn copy_text(whole: bool, below: usize, offset: usize) -> String {
    let copy = format!("cp.async.cg.shared.global.L2::128B [$0+{offset}], [$1], 16");
    match whole {
        true => {
            format!("{{ .reg .pred p; setp.le.s32 p, $2, {below}; {copy}, p; }} /* $3 */")
        }
        false => format!(
            "{{ .reg .pred p; .reg .b32 n; setp.gt.s32 p, $2, {below}; selp.b32 n, $3, 0, p; {copy}, n; }}"
        ),
    }
}

/// Starts to copy a piece `below` rows further down. Writes zeros unless more than `below` rows are `left`, and for bytes past `bytes`.
#[cube]
fn copy_piece(
    target: u32,
    source: u64,
    left: i32,
    bytes: u32,
    #[comptime] below: usize,
    #[comptime] offset: usize,
    #[comptime] whole: bool,
) {
    gpu_asm!("{body} /* {t} {f} {l} {n} */",
        body = const copy_text(whole, below, offset), t = in(_) val::<u32>(target), f = in(_) val::<u64>(source), l = in(_) val::<i32>(left),
        n = in(_) val::<u32>(bytes));
}

/// Starts to copy this unit's pieces `first..last` of a slab of a factor that is `width` wide in the tile. `from` is the factor's matrix. The slab begins at
/// `across` and `depth`; the matrix ends at `factor.across` and `depth_end`, or before everything if there is no such slab.
#[cube]
fn copy_slab(
    from: u64,
    factor: &Factor,
    across: u32,
    depth: u32,
    depth_end: u32,
    exists: bool,
    target: u32,
    #[comptime] order: Order,
    #[comptime] width: usize,
    #[comptime] first: usize,
    #[comptime] last: usize,
    #[comptime] t: MmaTile,
) {
    let units = comptime!(t.units());
    let is_deep = comptime!(order == Order::Depth);
    let pieces = comptime!(order.pieces(width));
    let own_row = UNIT_POS_X / comptime!(pieces as u32);
    let own_piece = UNIT_POS_X % comptime!(pieces as u32);
    let row = own_row + if comptime!(is_deep) { across } else { depth };
    let col = own_piece * comptime!(PIECE_NUMBERS as u32)
        + if comptime!(is_deep) { depth } else { across };
    let row_end = if comptime!(is_deep) {
        factor.across
    } else {
        depth_end
    };
    let col_end = if comptime!(is_deep) {
        depth_end
    } else {
        factor.across
    };
    let row_end = select(exists && col < col_end, row_end, 0u32);
    let bytes = if comptime!(t.whole) {
        0u32.runtime()
    } else {
        min((col_end - col) * 2, comptime!(PIECE as u32))
    };
    let rows_left = i32::cast_from(row_end) - i32::cast_from(row);
    let apart = comptime!(units / pieces);
    let pitch = u64::cast_from(factor.pitch);
    let step = pitch * comptime!(apart as u64);
    let row = row + comptime!((first * apart) as u32);
    // Incremental: addresses of all rows at once would take the registers that sums need.
    let mut source = from + u64::cast_from(row) * pitch + u64::cast_from(col) * 2;
    let target = target + piece_at(own_row, own_piece, pieces);
    #[unroll]
    for copy in first..last {
        let offset = comptime!(copy * apart * pieces * PIECE);
        let below = comptime!(copy * apart);
        copy_piece(target, source, rows_left, bytes, below, offset, t.whole);
        source += step;
    }
}

/// Slab to copy next, some slabs ahead of the products.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
struct Ahead {
    tile: u32,
    row: u32,
    col: u32,
    depth: u32,
    /// Remaining slabs of the tile, this one included.
    slabs: u32,
    /// Addresses of the factors' matrices.
    a: u64,
    b: u64,
}

/// Returns the offset of a matrix of a batch in bytes.
#[cube]
fn matrix_offset(factor: &Factor, batch: u32) -> u64 {
    let of_run = u64::cast_from(batch % factor.run) * u64::cast_from(factor.batch);
    let runs = u64::cast_from(batch / factor.run) * u64::cast_from(factor.outer);
    (of_run + runs) * comptime!(PIECE as u64)
}

/// Returns the first slab of a tile.
#[cube]
fn first_slab(
    tile: u32,
    a: u64,
    b: u64,
    left: &Factor,
    right: &Factor,
    tiles: &Tiles,
    #[comptime] t: MmaTile,
) -> Ahead {
    let place = place_of(tiles, tile, t.cols);
    Ahead {
        tile,
        row: place.row,
        col: place.col,
        depth: place.first * comptime!(SLAB as u32),
        slabs: place.count,
        a: a + matrix_offset(left, place.batch),
        b: b + matrix_offset(right, place.batch),
    }
}

/// Starts to copy a slab of the left factor, if there is one.
#[cube]
fn copy_left(
    ahead: &Ahead,
    left: &Factor,
    depth_end: u32,
    tiles: &Tiles,
    target: u32,
    #[comptime] t: MmaTile,
) {
    let exists = ahead.tile < tiles.count;
    let last = comptime!(copies(ROWS, t));
    copy_slab(
        ahead.a,
        left,
        ahead.row,
        ahead.depth,
        depth_end,
        exists,
        target,
        t.a,
        ROWS,
        0usize,
        last,
        t,
    );
}

/// Starts to copy one of the halves `from..to` of a slab of the right factor.
#[cube]
fn copy_right(
    ahead: &Ahead,
    right: &Factor,
    depth_end: u32,
    tiles: &Tiles,
    target: u32,
    #[comptime] from: usize,
    #[comptime] to: usize,
    #[comptime] t: MmaTile,
) {
    let exists = ahead.tile < tiles.count;
    let half = comptime!(copies(t.cols, t) / 2);
    copy_slab(
        ahead.b,
        right,
        ahead.col,
        ahead.depth,
        depth_end,
        exists,
        target + comptime!(t.a_bytes() as u32),
        t.b,
        t.cols,
        comptime!(from * half),
        comptime!(to * half),
        t,
    );
}

/// Returns the pieces of a slab that a unit copies, for a factor of this width.
fn copies(width: usize, t: MmaTile) -> usize {
    width * SLAB / PIECE_NUMBERS / t.units()
}

/// Loads the 16 × 16 blocks of a warp's part of a factor at depth `16 · step`, from the lane's [`lane_place`] in a slab.
#[cube]
fn load_blocks(
    place: u32,
    blocks: &mut Array<Vector<u32, Four>>,
    #[comptime] step: usize,
    #[comptime] order: Order,
    #[comptime] width: usize,
    #[comptime] count: usize,
) {
    #[unroll]
    for i in 0..count {
        let at = place ^ comptime!(beside([i, step], order));
        let offset = comptime!(below([i, step], order, order.pieces(width)));
        blocks[comptime!(step % 2 * count + i)] = if comptime!(order == Order::Depth) {
            load_matrices(at, offset)
        } else {
            load_transposes(at, offset)
        };
    }
}

/// Computes `a · b`; rows begin at multiples of 16 bytes. `out` is `[batch, parts, rows, columns]` in words.
#[cube(launch_unchecked)]
pub fn product<W: Size>(
    a: &[u32],
    b: &[u32],
    out: &mut [Vector<u32, W>],
    left: Factor,
    right: Factor,
    depth_end: u32,
    tiles: Tiles,
    #[comptime] t: MmaTile,
) {
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let warp_row = warp / comptime!(t.warps_across() as u32) * comptime!(WARP_ROWS as u32);
    let warp_col = warp % comptime!(t.warps_across() as u32) * comptime!(t.warp_cols as u32);
    let slab_bytes = comptime!(t.slab_bytes() as u32);
    let ring_end = base + comptime!(t.shared_bytes() as u32);
    let a_address = global_address::<u32>(a);
    let b_address = global_address::<u32>(b);
    let a_pieces = comptime!(t.a.pieces(ROWS));
    let b_pieces = comptime!(t.b.pieces(t.cols));
    let a_place = lane_place(warp_row, lane, true, t.a, a_pieces);
    let b_place = comptime!(t.a_bytes() as u32) + lane_place(warp_col, lane, false, t.b, b_pieces);
    let a_blocks = comptime!(WARP_ROWS / 16);
    let b_blocks = comptime!(t.warp_cols / 16);
    let eights = comptime!(t.warp_cols / 8);
    let element = comptime!(Element::Half(t.half));

    let mut ahead = first_slab(CUBE_POS_X, a_address, b_address, &left, &right, &tiles, t);
    let mut target = base;
    #[unroll]
    for _ in 0..comptime!(t.stages - 1) {
        copy_left(&ahead, &left, depth_end, &tiles, target, t);
        copy_right(&ahead, &right, depth_end, &tiles, target, 0usize, 2usize, t);
        commit_copies();
        target += slab_bytes;
        ahead.depth += comptime!(SLAB as u32);
        ahead.slabs -= 1;
        if ahead.slabs == 0 {
            let tile = ahead.tile + CUBE_COUNT_X;
            ahead = first_slab(tile, a_address, b_address, &left, &right, &tiles, t);
        }
    }
    wait_copies_but(comptime!(t.stages - 2));
    sync_cube();
    let mut slab = base;
    let mut rows = Array::<Vector<u32, Four>>::new(comptime!(2 * a_blocks));
    let mut cols = Array::<Vector<u32, Four>>::new(comptime!(2 * b_blocks));
    load_blocks(slab + a_place, &mut rows, 0usize, t.a, ROWS, a_blocks);
    load_blocks(slab + b_place, &mut cols, 0usize, t.b, t.cols, b_blocks);

    let mut tile = CUBE_POS_X;
    let mut left_over = place_of(&tiles, tile, t.cols).count;
    let mut sums = Array::<Vector<f32, Four>>::new(comptime!(a_blocks * eights));
    #[unroll]
    for i in 0..comptime!(a_blocks * eights) {
        sums[i] = Vector::<f32, Four>::zeroed();
    }
    while tile < tiles.count {
        // Slabs until either the copies or the products reach the next tile: a check in every slab would be expensive.
        let run = min(ahead.slabs, left_over);
        for _ in 0..run {
            #[unroll]
            for step in 0..STEPS {
                if comptime!(step == STEPS - 1) {
                    // All warps have read the slab, and their copies of the next one are complete.
                    wait_copies_but(comptime!(t.stages - 2));
                    sync_cube();
                    slab += slab_bytes;
                    slab = select(slab == ring_end, base, slab);
                }
                let next = comptime!((step + 1) % STEPS);
                load_blocks(slab + a_place, &mut rows, next, t.a, ROWS, a_blocks);
                load_blocks(slab + b_place, &mut cols, next, t.b, t.cols, b_blocks);
                // Copies are issued between products.
                if comptime!(step == 0) {
                    copy_left(&ahead, &left, depth_end, &tiles, target, t);
                }
                if comptime!(step == 1 || step == 2) {
                    let half = comptime!(step - 1);
                    copy_right(&ahead, &right, depth_end, &tiles, target, half, step, t);
                }
                if comptime!(step == 2) {
                    commit_copies();
                }
                #[unroll]
                for n in 0..eights {
                    #[unroll]
                    for m in 0..a_blocks {
                        let at = comptime!(m * eights + n);
                        let pair = cols[comptime!(step % 2 * b_blocks + n / 2)];
                        sums[at] = multiply(
                            rows[comptime!(step % 2 * a_blocks + m)],
                            pair.extract(comptime!(n % 2 * 2)),
                            pair.extract(comptime!(n % 2 * 2 + 1)),
                            sums[at],
                            element,
                        );
                    }
                }
            }
            target += slab_bytes;
            target = select(target == ring_end, base, target);
            ahead.depth += comptime!(SLAB as u32);
        }
        ahead.slabs -= run;
        left_over -= run;
        if ahead.slabs == 0 {
            let tile = ahead.tile + CUBE_COUNT_X;
            ahead = first_slab(tile, a_address, b_address, &left, &right, &tiles, t);
        }
        if left_over == 0 {
            let place = place_of(&tiles, tile, t.cols);
            let row = place.row + warp_row + lane / 4;
            let col = place.col + warp_col;
            if comptime!(t.wide) {
                store_wide::<W>(
                    out,
                    &sums,
                    place.matrix,
                    row,
                    col,
                    left.across,
                    right.across,
                    lane,
                    t,
                );
            } else {
                store_half::<W>(
                    out,
                    &sums,
                    place.matrix,
                    row,
                    col,
                    left.across,
                    right.across,
                    lane,
                    t,
                );
            }
            #[unroll]
            for i in 0..comptime!(a_blocks * eights) {
                sums[i] = Vector::<f32, Four>::zeroed();
            }
            tile += CUBE_COUNT_X;
            left_over = place_of(&tiles, tile, t.cols).count;
        }
    }
}

/// Writes sums unchanged: a unit has two of every eight columns, in rows from `row` on.
#[cube]
fn store_wide<W: Size>(
    out: &mut [Vector<u32, W>],
    sums: &Array<Vector<f32, Four>>,
    matrix: u32,
    row: u32,
    col: u32,
    rows: u32,
    cols: u32,
    lane: u32,
    #[comptime] t: MmaTile,
) {
    let eights = comptime!(t.warp_cols / 8);
    #[unroll]
    for upper in 0..comptime!(WARP_ROWS / 8) {
        let row = row + comptime!(8 * upper as u32);
        let at = (matrix * rows + row) as usize * (cols / 2) as usize;
        let end = select(row < rows, cols, 0u32);
        #[unroll]
        for n in 0..eights {
            let four = sums[comptime!(upper / 2 * eights + n)];
            let col = col + comptime!(8 * n as u32) + lane % 4 * 2;
            let mut words = Vector::<u32, W>::zeroed();
            #[unroll]
            for i in 0..2usize {
                let number = four.extract(comptime!(upper % 2 * 2 + i));
                words.insert(i, u32::reinterpret(number));
            }
            if col < end {
                out[at + (col / 2) as usize] = words;
            }
        }
    }
}

/// Writes sums in half precision. Four units of a row exchange, so that each has eight columns of 32.
#[cube]
fn store_half<W: Size>(
    out: &mut [Vector<u32, W>],
    sums: &Array<Vector<f32, Four>>,
    matrix: u32,
    row: u32,
    col: u32,
    rows: u32,
    cols: u32,
    lane: u32,
    #[comptime] t: MmaTile,
) {
    let eights = comptime!(t.warp_cols / 8);
    #[unroll]
    for upper in 0..comptime!(WARP_ROWS / 8) {
        let row = row + comptime!(8 * upper as u32);
        #[unroll]
        for chunk in 0..comptime!(eights / 4) {
            let mut own = Vector::<u32, Four>::zeroed();
            #[unroll]
            for j in 0..4usize {
                let four = sums[comptime!(upper / 2 * eights + 4 * chunk + j)];
                let first = comptime!(upper % 2 * 2);
                own.insert(j, pack_at::<Four>(&four, first, t.half));
            }
            let four = trade_four(own, lane);
            let col = col + comptime!(32 * chunk as u32) + lane % 4 * 8;
            let at = (matrix * rows + row) * (cols / 8) + col / 8;
            if row < rows && col < cols {
                out[at as usize] = as_stored::<W>(&four);
            }
        }
    }
}
