//! The shape of a tile, and where its parts lie in shared memory.

use crate::arch::sm80::*;
use crate::call::{Kernel, ScoreKind};
use crate::shared::own_rows::OwnShape;
use crate::shared::score::described_threshold;
use blocksparse::plan::{Mainloop, Tiling};

/// Stands for a position outside of the sequence.
pub const NOWHERE: u32 = u32::MAX;

/// A unit holds parts of rows `r` and `r + 8`.
pub const ROW_PAIR: u32 = 8;

/// The comptime shape of a kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Whose rows a tile's are.
    pub mainloop: Mainloop,
    /// What the products' operands are.
    pub element: Element,
    /// Width of queries and keys, a multiple of 8.
    pub head_dim: usize,
    /// Width of values, a multiple of 8.
    pub value_dim: usize,
    /// Warps of a cube.
    pub warps: usize,
    /// Times 16 rows of a warp. With 2 what a warp reads of the other operand is used twice.
    pub warp_tiles: usize,
    /// Columns of a step.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps in shared memory at a time: 2, or forward 1, and then keys arrive while values are used and values while keys are.
    pub stages: usize,
    /// What scores are besides scaled products.
    pub score: ScoreKind,
    /// Whether the forward kernel writes each row's largest score.
    pub max_scores: bool,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel carries on from what an earlier part of the pattern left in its outputs.
    pub carry: bool,
    /// Whether the tile's rows are gathered from like blocks.
    pub clustered: bool,
    /// Whether two rows of a tensor may be more than 4 GB apart, which is known with the tensors only.
    pub far_rows: bool,
    /// Whether the backward kernel makes the gradient of a given bias, and no other.
    pub bias_gradient: bool,
    /// In the backward pass, which of dK (or dQ) and dV a launch computes.
    pub outputs: Outputs,
}

/// What a launch of the backward kernel computes. dK and dV of wide heads together have no room in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outputs {
    /// dQ, or only dK.
    First,
    /// Only dV.
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
    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        16 * self.warp_tiles * self.warps
    }

    /// Units of a cube.
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

    /// Whether columns are queries and rows keys, and not the other way round.
    pub fn columns(&self) -> bool {
        self.mainloop == Mainloop::Columns
    }

    /// How the layout is cut.
    pub fn tiling(&self) -> Tiling {
        Tiling {
            clustered: self.clustered,
            ..Tiling::new(self.mainloop, self.rows(), self.cols)
        }
    }

    /// Whether layouts of this block size can be cut so.
    pub fn fits(&self, block: usize) -> bool {
        let rows = self.rows();
        (rows.is_multiple_of(block) || block.is_multiple_of(rows))
            && (self.cols.is_multiple_of(block) || block.is_multiple_of(self.cols))
    }

    /// Entries of a step.
    pub fn entries(&self) -> usize {
        self.cols / self.group
    }

    // Byte offsets in shared memory. The positions of the tile's own rows come first.

    /// Positions of a step's columns, and its head; there are such slots for the next two steps, and where scores depend on
    /// positions for the one that is computed.
    pub fn slot_offset(&self) -> usize {
        self.rows() * 4
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        (self.cols + 4) * 4
    }

    /// Slots of positions.
    pub fn slots(&self) -> usize {
        2 + usize::from(self.score.positions())
    }

    fn stats_offset(&self) -> usize {
        self.slot_offset() + self.slots() * self.slot_bytes()
    }

    /// lse and delta of a step's columns, in a loop over columns of queries.
    pub fn stats_bytes(&self) -> usize {
        self.cols * 8
    }

    /// Where the stats of a stage are.
    pub fn stats_at(&self, stage: usize) -> usize {
        self.stats_offset() + stage * self.stats_bytes()
    }

    /// The tile's own rows of width head_dim.
    pub fn a1_offset(&self) -> usize {
        self.stats_at(self.stages)
    }

    /// Those of width value_dim, which only the backward pass has.
    pub fn a2_offset(&self) -> usize {
        self.a1_offset() + self.rows() * self.pitch(self.head_dim)
    }

    /// Gathered rows of width head_dim, `stages` times.
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

    /// Gathered rows of width value_dim, `stages` times.
    pub fn b2_offset(&self, backward: bool) -> usize {
        self.b1_offset(backward) + self.stages * self.b1_bytes()
    }

    /// Bytes of a step's rows of width value_dim.
    pub fn b2_bytes(&self) -> usize {
        self.cols * self.pitch(self.value_dim)
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self, backward: bool) -> usize {
        self.b2_offset(backward) + self.stages * self.b2_bytes()
    }

    /// A width as it is in shared memory: a multiple of 16. What is beyond `dim` is zeros, see
    /// [`clear_beyond`](super::gather::clear_beyond).
    pub fn padded(&self, dim: usize) -> usize {
        dim.next_multiple_of(16)
    }

    /// Bytes between two rows in shared memory: an odd number of 16-byte pieces, so that eight neighbouring rows lie
    /// in different banks.
    pub fn pitch(&self, dim: usize) -> usize {
        self.padded(dim) * self.element.bytes() + 16
    }

    /// Products deep a width, or a step's columns, is.
    pub fn depth(&self, dim: usize) -> usize {
        dim.div_ceil(self.element.depth())
    }

    /// Whether a row of this width ends within the depth of a product.
    pub fn ragged(&self, dim: usize) -> bool {
        !dim.is_multiple_of(self.element.depth())
    }

    /// Words of a row in memory.
    pub fn words(&self, dim: usize) -> usize {
        dim * self.element.bytes() / 4
    }

    /// Eights of a step's columns.
    pub fn eights(&self) -> usize {
        self.cols / 8
    }
}

/// A tile as plans print it.
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
