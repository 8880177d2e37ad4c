//! Comptime shape of a cube's work.

use std::fmt;

use crate::kernels::linear::tile::{Order, ROWS, SLAB};
use blocksparse_cubecl::arch::ptx::Half;

/// Rows of a warp's sums.
pub const WARP_ROWS: usize = 64;
/// Bytes and elements of a piece, the unit of copies and of ldmatrix.
pub const PIECE: usize = 16;
pub const PIECE_NUMBERS: usize = 8;
/// Products of depth 16 in a slab.
pub const STEPS: usize = SLAB / 16;
/// Most slabs in shared memory.
const MOST_SLABS: usize = 4;
/// Shared memory that a multiprocessor reserves for each cube, in bytes.
const RESERVED: usize = 1024;

/// Shape of tiles.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Columns of a tile.
    pub cols: usize,
    /// Columns of a warp's sums.
    pub warp_cols: usize,
    /// Cubes that share a multiprocessor.
    pub cubes: usize,
    /// Cycles of a slab when all cubes of a multiprocessor are at work.
    pub cycles: usize,
}

/// All shapes. Reads of shared memory decide: with 64 × 64 sums a warp reads 4 KB for 64 mma.sync, which take twice as long as the reads; with 64 × 32 it
/// reads 3 KB for half of them. The cycles are estimates from that.
pub const VARIANTS: [Variant; 4] = [
    Variant {
        cols: 256,
        warp_cols: 64,
        cubes: 1,
        cycles: 2200,
    },
    Variant {
        cols: 128,
        warp_cols: 64,
        cubes: 2,
        cycles: 2350,
    },
    Variant {
        cols: 128,
        warp_cols: 32,
        cubes: 1,
        cycles: 1350,
    },
    Variant {
        cols: 64,
        warp_cols: 32,
        cubes: 2,
        cycles: 1500,
    },
];

/// Comptime shape of the kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaTile {
    /// Type of the factors.
    pub half: Half,
    /// Columns.
    pub cols: usize,
    /// Columns of a warp's sums.
    pub warp_cols: usize,
    /// Slabs in shared memory.
    pub stages: usize,
    /// Contiguous dimension of the left factor.
    pub a: Order,
    /// Contiguous dimension of the right factor.
    pub b: Order,
    /// True if results are f32.
    pub wide: bool,
    /// True if rows in memory end at a piece's boundary.
    pub whole: bool,
}

impl MmaTile {
    /// Returns a tile with the most slabs that fit if a cube may use `shared` bytes of shared memory. None: too few fit.
    pub fn new(
        half: Half,
        variant: Variant,
        [a, b]: [Order; 2],
        wide: bool,
        shared: usize,
    ) -> Option<Self> {
        let mut tile = Self {
            half,
            cols: variant.cols,
            warp_cols: variant.warp_cols,
            stages: 1,
            a,
            b,
            wide,
            whole: false,
        };
        let room = ((shared + RESERVED) / variant.cubes).checked_sub(RESERVED)?;
        tile.stages = (room / tile.slab_bytes()).min(MOST_SLABS);
        (tile.stages >= 2).then_some(tile)
    }

    /// Returns the number of warps along the columns; there are two along the rows.
    pub fn warps_across(&self) -> usize {
        self.cols / self.warp_cols
    }

    pub fn units(&self) -> usize {
        32 * (ROWS / WARP_ROWS) * self.warps_across()
    }

    /// Returns the bytes of the left factor's slab.
    pub fn a_bytes(&self) -> usize {
        2 * ROWS * SLAB
    }

    pub fn slab_bytes(&self) -> usize {
        2 * (ROWS + self.cols) * SLAB
    }

    pub fn shared_bytes(&self) -> usize {
        self.stages * self.slab_bytes()
    }

    /// Returns the elements of a result that a unit writes at a time.
    pub fn written(&self) -> usize {
        if self.wide { 2 } else { 8 }
    }
}

impl Order {
    /// Returns the pieces of a slab's row in shared memory, for a factor of `width` rows or columns. The contiguous dimension is the same as in memory.
    pub fn pieces(self, width: usize) -> usize {
        match self {
            Self::Depth => SLAB / PIECE_NUMBERS,
            Self::Across => width / PIECE_NUMBERS,
        }
    }
}

impl fmt::Display for MmaTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "tiles of {ROWS} × {}, {} units, {} slabs of {SLAB}",
            self.cols,
            self.units(),
            self.stages,
        )
    }
}
