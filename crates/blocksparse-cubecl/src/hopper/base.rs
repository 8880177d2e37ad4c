//! Compile-time shape that the tiles of all kernels share.

use std::fmt;

use crate::arch::sm90::{Half, ProductShape, ROW, ROW_ELEMENTS};
use crate::call::{PartRequest, ScoreKind};
use crate::shared::own_rows::OwnShape;
use blocksparse::plan::{Mainloop, Tiling};

/// Rows per warpgroup.
pub(super) const GROUP_ROWS: usize = 64;

/// Compile-time shape that all tiles share, part of the key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Base {
    /// Element type of the tensors.
    pub half: Half,
    /// Width of queries and keys in 16-bit elements, a multiple of 8.
    pub dim: usize,
    /// Number of warpgroups: 1 or 2.
    pub warpgroups: usize,
    /// Consecutive positions per entry.
    pub group: usize,
    /// Steps (or products) whose operands are in shared memory at a time.
    pub stages: usize,
    /// Number of steps after which a used buffer is refilled. With 1, a warp may have to wait for the other warpgroup.
    pub lag: usize,
    /// Options of scores besides scaled products.
    pub score: ScoreKind,
    /// Whether groups of eight keys of the bias are contiguous and 16-byte aligned.
    pub wide_bias: bool,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel continues from the outputs of an earlier part of the pattern.
    pub carry: bool,
    /// Block size, if a step is one coarse entry with a bit per block.
    pub coarse: Option<usize>,
    /// Tiling of the launch plan: rows per tile, 64 or 128, and columns per step.
    pub tiling: Tiling,
}

impl std::ops::Deref for Base {
    type Target = Tiling;

    fn deref(&self) -> &Tiling {
        &self.tiling
    }
}

impl Base {
    /// Returns the shape of a part with 64 rows per warpgroup. The list has the numbers of warpgroups, columns per step and stages, and the lag of refills.
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

    /// Sets whether a tile's rows are gathered from blocks with similar patterns.
    pub(super) fn clustered(self, clustered: bool) -> Self {
        Self {
            tiling: Tiling {
                clustered,
                ..self.tiling
            },
            ..self
        }
    }

    /// Sets coarse entries for this block size.
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

    /// Whether layouts of this block size can have this tile.
    pub fn fits(&self, block: usize) -> bool {
        [self.rows(), self.cols]
            .iter()
            .all(|side| side.is_multiple_of(block) || block.is_multiple_of(*side))
            && self.group == self.tiling.group(block)
            && (self.coarse).is_none_or(|_| self.tiling.may_be_coarse(block))
    }

    /// Rows per tile.
    pub fn rows(&self) -> usize {
        self.tiling.rows
    }

    /// Units per cube.
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

    /// Entries per step.
    pub(super) fn entries(&self) -> usize {
        self.cols / self.group
    }

    /// Returns the shape of products of own rows with a step's columns.
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

    /// Whether rows are keys and columns queries.
    pub(super) fn columns(&self) -> bool {
        self.mainloop == Mainloop::Columns
    }

    /// Blocks per row of a step, if entries are coarse.
    pub(super) fn coarse_blocks(&self) -> Option<usize> {
        self.coarse.map(|block| self.cols / block)
    }

    /// Registers of a unit's sums over the width.
    pub(super) fn sums(&self) -> usize {
        registers(self.dim)
    }

    /// Rows per box of the tile's own rows. All positions of a box are in one class and one block.
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

    /// Writes its description in printed plans, with the shared memory of a cube.
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

/// Returns the registers of a unit's sums of `columns` columns, for whole groups of 32 columns, of which a unit stores 16 bytes.
pub(super) fn registers(columns: usize) -> usize {
    (columns / 2).next_power_of_two().max(16)
}

/// Makes tiles dereference to their base.
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
