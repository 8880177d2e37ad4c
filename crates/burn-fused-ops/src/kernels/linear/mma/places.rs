//! Swizzled layout of slabs in shared memory; offsets are in bytes.
//!
//! A slab has the rows that the factor has in memory: 64 elements of the depth, or all elements across it. Within each eight pieces of 16 bytes of a row, the
//! pieces are permuted by the row's number. So the eight rows of an 8 × 8 matrix lie in different banks, and so do the pieces of a row.

use cubecl::prelude::*;

use crate::kernels::linear::mma::tile::{PIECE, PIECE_NUMBERS};
use crate::kernels::linear::tile::Order;

/// Returns the offset of a piece in a slab.
#[cube]
pub fn piece_at(row: u32, piece: u32, #[comptime] pieces: usize) -> u32 {
    (row * comptime!(pieces as u32) + (piece ^ (row % 8))) * comptime!(PIECE as u32)
}

/// Returns the offset of a lane's row of the four 8 × 8 matrices of a 16 × 16 block, for a warp whose part begins at `across` in the dimension across the
/// depth. The two halves of the left factor's rows come first, or those of the right factor's depth, as mma.sync requires.
#[cube]
pub fn lane_place(
    across: u32,
    lane: u32,
    #[comptime] left: bool,
    #[comptime] order: Order,
    #[comptime] pieces: usize,
) -> u32 {
    // True if the second matrix is below the first, not to its right.
    let is_below = comptime!(left == (order == Order::Depth));
    let row = if comptime!(is_below) {
        lane % 16
    } else {
        lane % 8 + lane / 16 * 8
    };
    let piece = if comptime!(is_below) {
        lane / 16
    } else {
        lane / 8 % 2
    };
    if comptime!(order == Order::Depth) {
        piece_at(across + row, piece, pieces)
    } else {
        piece_at(
            row,
            across / comptime!(PIECE_NUMBERS as u32) + piece,
            pieces,
        )
    }
}

/// Offset of a block that is `across` and `depth` blocks away from [`lane_place`]: the part along the row, to be xored.
pub fn beside([across, depth]: [usize; 2], order: Order) -> u32 {
    let blocks = match order {
        Order::Depth => depth,
        Order::Across => across,
    };
    (2 * blocks * PIECE) as u32
}

/// Offset of the same block: the part over rows, to be added.
pub fn below([across, depth]: [usize; 2], order: Order, pieces: usize) -> usize {
    let blocks = match order {
        Order::Depth => across,
        Order::Across => depth,
    };
    16 * blocks * pieces * PIECE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::linear::mma::tile::{MmaTile, STEPS, VARIANTS, WARP_ROWS};
    use crate::kernels::linear::tile::{ROWS, SLAB};
    use blocksparse_cubecl::arch::ptx::Half;

    const ORDERS: [Order; 2] = [Order::Depth, Order::Across];

    /// Lists the factors of all tiles: whether it is the left one, its width, the width of a warp's part, and the units that copy it.
    fn factors() -> Vec<(bool, usize, usize, usize)> {
        let of = |variant| {
            let tile = MmaTile::new(Half::Bf16, variant, ORDERS, false, 1 << 20).unwrap();
            [
                (true, ROWS, WARP_ROWS, tile.units()),
                (false, tile.cols, tile.warp_cols, tile.units()),
            ]
        };
        VARIANTS.into_iter().flat_map(of).collect()
    }

    /// Returns the offset of an element.
    fn number_at([across, depth]: [usize; 2], order: Order, width: usize) -> usize {
        let (row, col) = match order {
            Order::Depth => (across, depth),
            Order::Across => (depth, across),
        };
        let piece = piece_at(row as u32, (col / 8) as u32, order.pieces(width));
        piece as usize + col % 8 * 2
    }

    #[test]
    fn every_number_has_a_place_of_its_own() {
        for (_, width, _, _) in factors() {
            for order in ORDERS {
                let mut taken = vec![false; 2 * width * SLAB];
                for across in 0..width {
                    for depth in 0..SLAB {
                        let at = number_at([across, depth], order, width);
                        assert!(!std::mem::replace(&mut taken[at], true), "{order:?}");
                    }
                }
            }
        }
    }

    /// Copies as the kernel assigns pieces to units: each piece is copied once, and eight neighbours write to different banks.
    #[test]
    fn every_piece_is_copied_once() {
        for (_, width, _, units) in factors() {
            for order in ORDERS {
                let pieces = order.pieces(width);
                let apart = units / pieces;
                assert_eq!(apart % 8, 0);
                let count = width * SLAB / PIECE_NUMBERS / units;
                let mut taken = vec![false; width * SLAB / PIECE_NUMBERS];
                for copy in 0..count {
                    let places: Vec<_> = (0..units)
                        .map(|unit| {
                            let own =
                                piece_at((unit / pieces) as u32, (unit % pieces) as u32, pieces);
                            own as usize + copy * apart * pieces * PIECE
                        })
                        .collect();
                    for eight in places.chunks(8) {
                        let mut banks: Vec<_> = eight.iter().map(|at| at / PIECE % 8).collect();
                        banks.sort_unstable();
                        assert_eq!(banks, (0..8).collect::<Vec<_>>());
                    }
                    for at in places {
                        assert!(!std::mem::replace(&mut taken[at / PIECE], true));
                    }
                }
                assert!(taken.iter().all(|taken| *taken));
            }
        }
    }

    /// ldmatrix gives each lane what mma.sync requires, and the eight rows of each matrix lie in different banks.
    #[test]
    fn lanes_get_their_numbers() {
        for (left, width, warp, _) in factors() {
            for order in ORDERS {
                let pieces = order.pieces(width);
                for first in (0..width).step_by(warp) {
                    for (block, step) in
                        (0..warp / 16).flat_map(|i| (0..STEPS).map(move |k| (i, k)))
                    {
                        let address = |lane: u32| {
                            let place = lane_place(first as u32, lane, left, order, pieces);
                            (place ^ beside([block, step], order)) as usize
                                + below([block, step], order, pieces)
                        };
                        for matrix in 0..4 {
                            let rows: Vec<_> = (0..8).map(|i| address(8 * matrix + i)).collect();
                            let mut banks: Vec<_> = rows.iter().map(|at| at / PIECE % 8).collect();
                            banks.sort_unstable();
                            assert_eq!(banks, (0..8).collect::<Vec<_>>());
                            for lane in 0..32usize {
                                for number in 0..2 {
                                    // A lane gets two elements of row lane / 4, or of that column if transposed.
                                    let (of_eight, of_depth) = (lane / 4, lane % 4 * 2 + number);
                                    let got = match order {
                                        Order::Depth => rows[of_eight] + 2 * of_depth,
                                        Order::Across => rows[of_depth] + 2 * of_eight,
                                    };
                                    // The left operand's second word belongs to the rows below, the right one's to the next half of the depth.
                                    let (one, other) = (matrix as usize % 2, matrix as usize / 2);
                                    let (low, deep) =
                                        if left { (one, other) } else { (other, one) };
                                    let wanted = [
                                        first + 16 * block + 8 * low + of_eight,
                                        16 * step + 8 * deep + of_depth,
                                    ];
                                    assert_eq!(got, number_at(wanted, order, width));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}
