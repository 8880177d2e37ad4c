//! The shape of a cube's work.

use std::fmt;

use crate::kernels::linear::tile::{Order, ROWS, SLAB};
use blocksparse_cubecl::arch::ptx::Half;

/// Rows of a warp's sums.
pub const WARP_ROWS: usize = 64;
/// Bytes and numbers of what is copied, and read by ldmatrix, at a time.
pub const PIECE: usize = 16;
pub const PIECE_NUMBERS: usize = 8;
/// Products of 16 of the depth in a slab.
pub const STEPS: usize = SLAB / 16;
/// The most slabs in shared memory.
const MOST_SLABS: usize = 4;
/// What a multiprocessor keeps of its shared memory for each cube.
const RESERVED: usize = 1024;

/// A shape that tiles may have.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Columns of a tile.
    pub cols: usize,
    /// Columns of a warp's sums.
    pub warp_cols: usize,
    /// Cubes that share a multiprocessor.
    pub cubes: usize,
    /// Cycles of a slab, all cubes of a multiprocessor at work.
    pub cycles: usize,
}

/// All shapes. What counts is how often shared memory is read: with 64 × 64 sums a warp reads 4 KB for 64 mma.sync, which take twice as long; with
/// 64 × 32 it reads 3 KB for half of them. The cycles are estimates from that.
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

/// The comptime shape of the kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaTile {
    /// The type of the factors.
    pub half: Half,
    /// Columns.
    pub cols: usize,
    /// Columns of a warp's sums.
    pub warp_cols: usize,
    /// Slabs in shared memory.
    pub stages: usize,
    /// How the left factor lies.
    pub a: Order,
    /// How the right factor lies.
    pub b: Order,
    /// Whether results are f32.
    pub wide: bool,
    /// Whether rows in memory end with a piece of 16 bytes, and not in one.
    pub whole: bool,
}

impl MmaTile {
    /// A tile with as many slabs as fit, where a cube may have so much shared memory. None: too few do.
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

    /// Warps side by side; there are two such rows of them.
    pub fn warps_across(&self) -> usize {
        self.cols / self.warp_cols
    }

    pub fn units(&self) -> usize {
        32 * (ROWS / WARP_ROWS) * self.warps_across()
    }

    /// Bytes of the left factor's slab.
    pub fn a_bytes(&self) -> usize {
        2 * ROWS * SLAB
    }

    pub fn slab_bytes(&self) -> usize {
        2 * (ROWS + self.cols) * SLAB
    }

    pub fn shared_bytes(&self) -> usize {
        self.stages * self.slab_bytes()
    }

    /// Numbers of a result that a unit writes at a time.
    pub fn written(&self) -> usize {
        if self.wide { 2 } else { 8 }
    }
}

impl Order {
    /// Pieces of a row of a slab in shared memory, of a factor of so many rows or columns. What is contiguous in memory is so there.
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
