//! Shape of a tile, and offsets of its parts in shared memory.

use crate::arch::sm80::*;
use crate::call::{Kernel, ScoreKind};
use crate::shared::own_rows::OwnShape;
use crate::shared::score::described_threshold;
use blocksparse::plan::{Mainloop, Tiling};

/// Marks a position outside the sequence.
pub const NOWHERE: u32 = u32::MAX;

/// A unit holds parts of rows `r` and `r + 8`.
pub const ROW_PAIR: u32 = 8;

/// Compile-time shape of a kernel, part of the key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Whether a tile's rows are queries or keys.
    pub mainloop: Mainloop,
    /// Operand type of the products.
    pub element: Element,
    /// Width of queries and keys, a multiple of 8.
    pub head_dim: usize,
    /// Width of values, a multiple of 8.
    pub value_dim: usize,
    /// Warps per cube.
    pub warps: usize,
    /// Number of 16-row tiles per warp. With 2, a warp uses each element that it reads of the other operand twice.
    pub warp_tiles: usize,
    /// Columns per step.
    pub cols: usize,
    /// Consecutive positions per entry.
    pub group: usize,
    /// Steps in shared memory at a time: 2, or 1 in the forward pass. With 1, keys are loaded while values are used, and values while keys are used.
    pub stages: usize,
    /// Options of scores besides scaled products.
    pub score: ScoreKind,
    /// Whether the forward kernel writes each row's largest score.
    pub max_scores: bool,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel continues from the outputs of an earlier part of the pattern.
    pub carry: bool,
    /// Whether the tile's rows are gathered from blocks with similar patterns.
    pub clustered: bool,
    /// Whether rows of a tensor may be more than 4 GB apart. Set at launch, when the tensors are known.
    pub far_rows: bool,
    /// Whether the backward kernel computes the gradient of a bias instead of those of its inputs.
    pub bias_gradient: bool,
    /// In the backward pass, which of dK (or dQ) and dV a launch computes.
    pub outputs: Outputs,
}

/// Outputs of a launch of the backward kernel. For wide heads, dK and dV together do not fit the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outputs {
    /// dQ, or dK alone.
    First,
    /// dV alone.
    Second,
    /// dK and dV.
    Both,
}

impl Outputs {
    /// Whether dQ or dK is computed.
    pub fn first(self) -> bool {
        self != Self::Second
    }

    /// Whether dV is computed.
    pub fn second(self) -> bool {
        self != Self::First
    }
}

impl Tile {
    /// Rows per tile.
    pub fn rows(&self) -> usize {
        16 * self.warp_tiles * self.warps
    }

    /// Units per cube.
    pub fn units(&self) -> usize {
        32 * self.warps
    }

    pub(crate) fn own_shape(&self) -> OwnShape {
        OwnShape {
            rows: self.rows(),
            group: self.group,
            clustered: self.clustered,
        }
    }

    /// Whether rows are keys and columns queries.
    pub fn columns(&self) -> bool {
        self.mainloop == Mainloop::Columns
    }

    /// Returns the tiling of the launch plan.
    pub fn tiling(&self) -> Tiling {
        Tiling {
            clustered: self.clustered,
            ..Tiling::new(self.mainloop, self.rows(), self.cols)
        }
    }

    /// Whether layouts of this block size can have this tile.
    pub fn fits(&self, block: usize) -> bool {
        let rows = self.rows();
        (rows.is_multiple_of(block) || block.is_multiple_of(rows))
            && (self.cols.is_multiple_of(block) || block.is_multiple_of(self.cols))
    }

    /// Entries per step.
    pub fn entries(&self) -> usize {
        self.cols / self.group
    }

    // Byte offsets in shared memory. The positions of the tile's own rows come first.

    /// Slots with the positions of a step's columns, and its head. There are slots for the next two steps, and for the current one if scores depend on
    /// positions.
    pub fn slot_offset(&self) -> usize {
        self.rows() * 4
    }

    /// Bytes per slot.
    pub fn slot_bytes(&self) -> usize {
        (self.cols + 4) * 4
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        2 + usize::from(self.score.positions())
    }

    fn stats_offset(&self) -> usize {
        self.slot_offset() + self.slots() * self.slot_bytes()
    }

    /// Bytes of lse and delta of a step's columns, in a loop over columns.
    pub fn stats_bytes(&self) -> usize {
        self.cols * 8
    }

    /// Offset of the stats of a stage.
    pub fn stats_at(&self, stage: usize) -> usize {
        self.stats_offset() + stage * self.stats_bytes()
    }

    /// Offset of the tile's own rows of width head_dim.
    pub fn a1_offset(&self) -> usize {
        self.stats_at(self.stages)
    }

    /// Offset of the tile's own rows of width value_dim, which only the backward pass has.
    pub fn a2_offset(&self) -> usize {
        self.a1_offset() + self.rows() * self.pitch(self.head_dim)
    }

    /// Offset of the gathered rows of width head_dim, one set per stage.
    pub fn b1_offset(&self, backward: bool) -> usize {
        match backward {
            true => self.a2_offset() + self.rows() * self.pitch(self.value_dim),
            false => self.a2_offset(),
        }
    }

    /// Bytes of a step's rows of width head_dim.
    pub fn b1_bytes(&self) -> usize {
        self.cols * self.pitch(self.head_dim)
    }

    /// Offset of the gathered rows of width value_dim, one set per stage.
    pub fn b2_offset(&self, backward: bool) -> usize {
        self.b1_offset(backward) + self.stages * self.b1_bytes()
    }

    /// Bytes of a step's rows of width value_dim.
    pub fn b2_bytes(&self) -> usize {
        self.cols * self.pitch(self.value_dim)
    }

    /// Bytes of shared memory per cube.
    pub fn shared_bytes(&self, backward: bool) -> usize {
        self.b2_offset(backward) + self.stages * self.b2_bytes()
    }

    /// Returns a width rounded up to a multiple of 16, as in shared memory. The padding holds zeros: see [`clear_beyond`](super::gather::clear_beyond).
    pub fn padded(&self, dim: usize) -> usize {
        dim.next_multiple_of(16)
    }

    /// Row stride in shared memory in bytes: an odd number of 16-byte pieces, so that eight neighbouring rows are in different banks.
    pub fn pitch(&self, dim: usize) -> usize {
        self.padded(dim) * self.element.bytes() + 16
    }

    /// Number of mma.sync products that cover a width, or a step's columns, as depth.
    pub fn depth(&self, dim: usize) -> usize {
        dim.div_ceil(self.element.depth())
    }

    /// Whether a row of this width ends within the depth of a product.
    pub fn ragged(&self, dim: usize) -> bool {
        !dim.is_multiple_of(self.element.depth())
    }

    /// Words per row in memory.
    pub fn words(&self, dim: usize) -> usize {
        dim * self.element.bytes() / 4
    }

    /// Groups of eight columns per step.
    pub fn eights(&self) -> usize {
        self.cols / 8
    }
}

/// Returns a tile's description in printed plans.
pub fn describe(tile: Tile, kernel: Kernel) -> String {
    let like = match tile.clustered {
        true => ", like rows together",
        false => "",
    };
    let tf32 = match tile.element {
        Element::Tf32 => "in tf32, ",
        Element::Half(_) => "",
    };
    let split = match (kernel, tile.outputs) {
        (Kernel::BackwardColumns, Outputs::First) if !tile.bias_gradient => ", one output a launch",
        _ => "",
    };
    format!(
        "mma     {tf32}{} × {} tiles gathered from {}-wide blocks{like}, {} units, {} stages in {} KiB shared{split}{}",
        tile.rows(),
        tile.cols,
        tile.group,
        tile.units(),
        tile.stages,
        tile.shared_bytes(kernel != Kernel::Forward).div_ceil(1024),
        described_threshold(tile.score, true),
    )
}
