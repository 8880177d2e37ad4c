//! Comptime shape of a cube's work.

use crate::kernels::linear::asm::{MainLoop, STEPS};
use crate::kernels::linear::blocks::tables::{Direction, GROUP};
use crate::kernels::linear::tile::{Order, SLAB};
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::tma::{DEPTH, ROW};

/// Bytes of the barriers, before the slabs.
const BARRIERS: usize = 1024;
/// Bytes of a warpgroup's left factor in a slab.
pub const LEFT_BYTES: usize = GROUP * ROW;

/// Product of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A packed weight with gathered columns.
    Gathered(Direction),
    /// Columns of x with gathered columns of the gradient with respect to the result.
    Weight,
}

/// Partition of a tile between the two warpgroups of a cube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Each has other rows of the same 64 outputs; for the gradient with respect to the weight, other outputs of the same 64 inputs.
    Right,
    /// Each has one half of a block of 128, with the same right factor.
    Left,
}

/// Comptime shape of the kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockTile {
    /// Type of the factors.
    pub half: Half,
    pub work: Work,
    pub split: Split,
    /// Columns of a cell: 16, 32 or 64.
    pub cell: usize,
    /// Inputs and outputs of a block.
    pub block: usize,
    /// Columns of a warpgroup's sums.
    pub cols: usize,
    /// Slabs in shared memory.
    pub stages: usize,
}

impl BlockTile {
    /// Sets the most slabs that fit in shared memory. None: fewer than two fit.
    pub fn with_stages(mut self, shared: usize) -> Option<Self> {
        let room = shared.checked_sub(BARRIERS)?;
        self.stages = (room / self.slab_bytes()).min(8);
        (self.stages >= 2).then_some(self)
    }

    /// Returns the cells of a slab, or of a group.
    pub fn side(&self) -> usize {
        SLAB / self.cell
    }

    /// Returns the left factors of a slab.
    pub fn lefts(&self) -> usize {
        if self.split == Split::Right { 1 } else { 2 }
    }

    /// Returns the right factors of a slab.
    pub fn rights(&self) -> usize {
        if self.split == Split::Left { 1 } else { 2 }
    }

    pub fn right_bytes(&self) -> usize {
        self.cols * ROW
    }

    /// Returns the offset of the right factors in a slab.
    pub fn right(&self) -> u32 {
        (self.lefts() * LEFT_BYTES) as u32
    }

    pub fn slab_bytes(&self) -> usize {
        self.lefts() * LEFT_BYTES + self.rights() * self.right_bytes()
    }

    pub fn empty(&self) -> u32 {
        8 * self.stages as u32
    }

    pub fn slabs(&self) -> u32 {
        BARRIERS as u32
    }

    pub fn shared_bytes(&self) -> usize {
        BARRIERS + self.stages * self.slab_bytes()
    }

    /// Returns the boxes of a right factor.
    pub fn boxes(&self) -> usize {
        match self.work {
            Work::Gathered(_) => self.side(),
            Work::Weight => self.cols / self.cell,
        }
    }

    /// Returns the number of columns of a slab or a tile at which boxes begin.
    pub fn entries(&self) -> usize {
        match self.work {
            Work::Gathered(_) => self.boxes(),
            Work::Weight => self.rights() * self.boxes(),
        }
    }

    pub fn box_bytes(&self) -> usize {
        self.right_bytes() / self.boxes()
    }

    /// Returns the bytes of a row of the right factor in shared memory, which is the span of its swizzle.
    pub fn right_row(&self) -> usize {
        2 * self.cell
    }

    pub fn main_loop(&self) -> MainLoop {
        let (left, right) = match self.work {
            // Packed in the weight's order: forward its rows are the depth.
            Work::Gathered(Direction::Forward) => (Order::Across, Order::Depth),
            Work::Gathered(Direction::Backward) => (Order::Depth, Order::Depth),
            Work::Weight => (Order::Across, Order::Across),
        };
        let mut offsets = [left.offsets(), [0; STEPS]];
        for (step, offset) in offsets[1].iter_mut().enumerate() {
            let depth = step * DEPTH;
            let bytes = match right {
                Order::Depth => depth / self.cell * self.box_bytes() + 2 * (depth % self.cell),
                Order::Across => depth * self.right_row(),
            };
            *offset = bytes >> 4;
        }
        MainLoop {
            half: self.half,
            cols: self.cols,
            stages: self.stages,
            slab_bytes: self.slab_bytes(),
            empty: self.empty(),
            across: [left, right].map(|order| order == Order::Across),
            offsets,
        }
    }
}
