//! What the comptime shapes of all kernels have.

use std::fmt;

use crate::arch::sm90::{Half, ProductShape, ROW, ROW_ELEMENTS};
use crate::call::{PartRequest, ScoreKind};
use crate::shared::own_rows::OwnShape;
use blocksparse::plan::{Mainloop, Tiling};

/// Rows of a warpgroup.
pub(super) const GROUP_ROWS: usize = 64;

/// What all tiles have: the comptime shapes of kernels, keys in the cache of compiled ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Base {
    /// Type of the tensors.
    pub half: Half,
    /// Width of queries and keys in elements of 16 bits, a multiple of 8.
    pub dim: usize,
    /// Warpgroups: 1 or 2.
    pub warpgroups: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps, or products, whose operands are in shared memory at a time.
    pub stages: usize,
    /// How many of them late a buffer is filled again: with 1 a warp may have to wait for the other warpgroup.
    pub lag: usize,
    /// What scores are besides scaled products.
    pub score: ScoreKind,
    /// Whether eight keys of the bias lie side by side, at a multiple of 16 bytes.
    pub wide_bias: bool,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel carries on from what an earlier part of the pattern left in its outputs.
    pub carry: bool,
    /// The size of blocks, where a step is one coarse entry with bits of them.
    pub coarse: Option<usize>,
    /// How the layout is cut: rows of a tile, 64 or 128, and columns of a step.
    pub tiling: Tiling,
}

impl std::ops::Deref for Base {
    type Target = Tiling;

    fn deref(&self) -> &Tiling {
        &self.tiling
    }
}

impl Base {
    /// Of a part, with 64 rows to a warpgroup: warpgroups, columns of a step, stages, and how late buffers are filled again.
    pub(super) fn new(
        part: &PartRequest,
        (half, dim): (Half, usize),
        mainloop: Mainloop,
        [warpgroups, cols, stages, lag]: [usize; 4],
    ) -> Self {
        Self {
            half,
            dim,
            warpgroups,
            group: cols.min(part.layout.block_size()),
            stages,
            lag,
            score: part.request.score,
            wide_bias: false,
            residue: part.residue.is_some(),
            carry: part.carry,
            coarse: None,
            tiling: Tiling::new(mainloop, GROUP_ROWS * warpgroups, cols),
        }
    }

    /// With tiles of like blocks, or not.
    pub(super) fn clustered(self, clustered: bool) -> Self {
        Self {
            tiling: Tiling {
                clustered,
                ..self.tiling
            },
            ..self
        }
    }

    /// With coarse entries of such blocks.
    pub(super) fn coarse(self, block: usize) -> Self {
        Self {
            group: self.cols,
            coarse: Some(block),
            tiling: Tiling {
                clustered: false,
                coarse: true,
                ..self.tiling
            },
            ..self
        }
    }

    /// Whether layouts of this block size can be cut so.
    pub fn fits(&self, block: usize) -> bool {
        [self.rows(), self.cols]
            .iter()
            .all(|side| side.is_multiple_of(block) || block.is_multiple_of(*side))
            && self.group == self.tiling.group(block)
            && (self.coarse).is_none_or(|_| self.tiling.may_be_coarse(block))
    }

    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        self.tiling.rows
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        128 * self.warpgroups
    }

    pub(super) fn warps(&self) -> u32 {
        4 * self.warpgroups as u32
    }

    /// Spans of 64 columns in shared memory.
    pub(super) fn spans(&self) -> usize {
        self.dim.div_ceil(ROW_ELEMENTS)
    }

    /// Entries of a step.
    pub(super) fn entries(&self) -> usize {
        self.cols / self.group
    }

    /// Of products of own rows with a step's columns.
    pub(super) fn scores(&self, depth: usize) -> ProductShape {
        ProductShape {
            half: self.half,
            fp8: false,
            depth,
            a_span: self.rows() * ROW,
            b_span: self.cols * ROW,
        }
    }

    pub(super) fn own_shape(&self) -> OwnShape {
        OwnShape {
            rows: self.rows(),
            group: self.group,
            clustered: self.clustered,
        }
    }

    /// Whether columns are queries and rows keys, and not the other way round.
    pub(super) fn columns(&self) -> bool {
        self.mainloop == Mainloop::Columns
    }

    /// Blocks of a row of a step, where entries are coarse.
    pub(super) fn coarse_blocks(&self) -> Option<usize> {
        self.coarse.map(|block| self.cols / block)
    }

    /// Registers of a unit's sums over the width.
    pub(super) fn sums(&self) -> usize {
        registers(self.dim)
    }

    /// Rows of a box of the tile's own rows. All positions of a box are of one class and one block.
    pub(super) fn a_group(&self) -> usize {
        match self.residue || self.clustered {
            true => self.rows().min(self.group),
            false => self.rows(),
        }
    }

    /// Boxes of the own rows of one tensor.
    pub(super) fn a_boxes(&self) -> usize {
        self.rows() / self.a_group() * self.spans()
    }

    /// Bytes of the own rows of one tensor.
    pub(super) fn a_bytes(&self) -> usize {
        self.rows() * self.spans() * ROW
    }

    /// Bytes of a step's rows of one tensor.
    pub(super) fn b_bytes(&self) -> usize {
        self.cols * self.spans() * ROW
    }

    /// As plans print it, with the shared memory of a cube.
    pub(super) fn describe(&self, f: &mut fmt::Formatter<'_>, shared_bytes: usize) -> fmt::Result {
        let of_blocks = match (self.coarse, self.clustered) {
            (Some(block), _) => format!("with bits of {block}-wide blocks"),
            (None, true) => format!(
                "gathered from {}-wide blocks, like rows together",
                self.group
            ),
            (None, false) => format!("gathered from {}-wide blocks", self.group),
        };
        write!(
            f,
            "hopper  {} × {} tiles {of_blocks}, {} units, {} stages in {} KiB shared",
            self.rows(),
            self.cols,
            self.units(),
            self.stages,
            shared_bytes.div_ceil(1024),
        )
    }
}

/// Registers of a unit's sums of so many columns: those of whole 32, of which a unit stores 16 bytes.
pub(super) fn registers(columns: usize) -> usize {
    (columns / 2).next_power_of_two().max(16)
}

/// A tile has what its base has.
macro_rules! with_base {
    ($($tile:ident),*) => {$(
        impl std::ops::Deref for $tile {
            type Target = $crate::hopper::base::Base;

            fn deref(&self) -> &Self::Target {
                &self.base
            }
        }
    )*};
}
pub(super) use with_base;
