//! The comptime shapes of the kernels, and where their parts lie in shared memory.

use std::fmt;

use super::bits::BitShape;
use super::gradient::{MaskShape, StoreShape};
pub use super::mainloop_tile::MainloopTile;
use super::options::{Options, PairShape};
use super::pair_tile::PairTile;
use crate::arch::sm90::{Half, ProductShape, ROW, ROW_ELEMENTS};
use crate::shared::own_rows::OwnShape;
use crate::shared::score::described_threshold;
use blocksparse::plan::{Mainloop, Tiling};

/// Rows of a warpgroup.
pub(super) const GROUP_ROWS: usize = 64;

/// Sizes that all tiles have: warpgroups with 64 rows each, and columns of `group` side by side.
macro_rules! sizes {
    ($($tile:ident),*) => {$(
        impl $tile {
            /// Rows of a tile.
            pub fn rows(&self) -> usize {
                GROUP_ROWS * self.row_groups()
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

            /// The pairs of a step of a layout that is cut so.
            pub(super) fn pairs_of(&self, tiling: Tiling) -> PairShape {
                PairShape {
                    options: self.options,
                    mainloop: tiling.mainloop,
                    half: self.half,
                    cols: self.cols,
                    group: self.group,
                    entry_words: tiling.entry_words(),
                    residue: self.residue,
                }
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
        }
    )*};
}

sizes!(Tile, BackwardTile, MainloopTile, PairTile);

/// What is the same of all tiles with sums of rows.
macro_rules! common {
    ($($tile:ident),*) => {$(
        impl $tile {
            /// Registers of a unit's sums over the width.
            pub(super) fn sums(&self) -> usize {
                registers(self.sum_width())
            }

            pub(super) fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let of_blocks = match (self.coarse(), self.clustered) {
                    (Some(block), _) => format!("with bits of {block}-wide blocks"),
                    (None, true) => format!("gathered from {}-wide blocks, like rows together", self.group),
                    (None, false) => format!("gathered from {}-wide blocks", self.group),
                };
                write!(
                    f,
                    "hopper  {} × {} tiles {of_blocks}, {} units, {} stages in {} KiB shared",
                    self.rows(),
                    self.cols,
                    self.units(),
                    self.stages,
                    self.shared_bytes().div_ceil(1024),
                )
            }
        }
    )*};
}

common!(Tile, BackwardTile, MainloopTile);

/// Registers of a unit's sums of so many columns: those of whole 32, of which a unit stores 16 bytes.
fn registers(columns: usize) -> usize {
    (columns / 2).next_power_of_two().max(16)
}

/// What is the same of the tiles of the backward pass.
macro_rules! backward {
    ($($tile:ident),*) => {$(
        impl $tile {
            pub(super) fn mask(&self) -> MaskShape {
                MaskShape {
                    rows: self.rows(),
                    cols: self.cols,
                    group: self.group,
                    entry_words: self.entry_words(),
                }
            }
        }
    )*};
}

backward!(BackwardTile, MainloopTile, PairTile);

/// What is the same of those with gradients of rows.
macro_rules! common_backward {
    ($($tile:ident),*) => {$(
        impl $tile {
            pub(super) fn store(&self) -> StoreShape {
                StoreShape {
                    half: self.half,
                    dim: self.dim,
                    residue: self.residue,
                    carry: self.carry,
                }
            }

            /// Bytes of a step's rows of one tensor.
            pub(super) fn b_bytes(&self) -> usize {
                self.cols * self.spans() * ROW
            }
        }
    )*};
}

common_backward!(BackwardTile, MainloopTile);

/// The comptime shape of the kernel: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Type of the tensors.
    pub half: Half,
    /// Whether products are of E4M3.
    pub fp8: bool,
    /// Width of queries and keys in elements of 16 bits, a multiple of 8.
    pub dim: usize,
    /// Width of values, no larger.
    pub value_dim: usize,
    /// Warpgroups, each with 64 rows: 1 or 2.
    pub warpgroups: usize,
    /// Columns of a step: 64 or 128.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps whose keys and values are in shared memory at a time.
    pub stages: usize,
    /// How many steps late a buffer is filled again: with 1 a warp may have to wait for the other warpgroup.
    pub lag: usize,
    /// Whether a step's second product overlaps the next step's softmax.
    pub overlap: bool,
    /// Whether each row's largest score is written.
    pub max_scores: bool,
    /// What else a call may ask for.
    pub options: Options,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether the kernel carries on from what an earlier part of the pattern left in its outputs.
    pub carry: bool,
    /// Whether the tile's rows are gathered from like blocks.
    pub clustered: bool,
    /// The size of blocks, where a step is one coarse entry with bits of them.
    pub coarse: Option<usize>,
    /// Whether tiles of all heads begin in turn, the longest first, and not head after head.
    pub heads_in_turn: bool,
}

impl Tile {
    fn coarse(&self) -> Option<usize> {
        self.coarse
    }

    fn row_groups(&self) -> usize {
        self.warpgroups
    }

    /// How the layout is cut.
    pub fn tiling(&self) -> Tiling {
        Tiling {
            clustered: self.clustered,
            coarse: self.coarse.is_some(),
            ..Tiling::new(Mainloop::Rows, self.rows(), self.cols)
        }
    }

    /// Words of an entry.
    pub(super) fn entry_words(&self) -> usize {
        self.tiling().entry_words()
    }

    pub(super) fn bits(&self) -> Option<BitShape> {
        BitShape::of(self.coarse, self.tiling())
    }

    /// Whether layouts of this block size can be cut so.
    pub fn fits(&self, block: usize) -> bool {
        let rows = self.rows();
        (rows.is_multiple_of(block) || block.is_multiple_of(rows))
            && (self.cols.is_multiple_of(block) || block.is_multiple_of(self.cols))
            && self.group == self.tiling().group(block)
            && self
                .coarse
                .is_none_or(|_| self.tiling().may_be_coarse(block))
    }

    pub(super) fn pairs(&self) -> PairShape {
        self.pairs_of(self.tiling())
    }

    /// Whether there are registers for a step's masks while its scores are computed.
    pub(super) fn early_masks(&self) -> bool {
        self.overlap || self.value_dim <= 64
    }

    /// Whether the warpgroups take turns at the tensor cores.
    pub(super) fn turns(&self) -> bool {
        self.warpgroups == 2 && self.overlap
    }

    /// Whether there are registers for a step's second product beside the sums, where nothing overlaps.
    pub(super) fn sums_apart(&self) -> bool {
        self.value_dim <= 128 && !self.fp8
    }

    /// Registers of a unit's weights of a step as an operand.
    pub(super) fn weights(&self) -> usize {
        self.cols / if self.fp8 { 8 } else { 4 }
    }

    /// Of the first product.
    pub(super) fn first_product(&self) -> ProductShape {
        ProductShape {
            fp8: self.fp8,
            ..self.scores(self.dim)
        }
    }

    /// Columns of the sums.
    fn sum_width(&self) -> usize {
        self.value_dim
    }

    /// Spans of 64 columns of values in shared memory.
    pub(super) fn value_spans(&self) -> usize {
        match self.fp8 {
            true => 1,
            false => self.value_dim.div_ceil(ROW_ELEMENTS),
        }
    }

    /// Bytes from one entry's box of a step's keys or values to the next one's.
    pub(super) fn box_bytes(&self, values: bool) -> usize {
        match self.fp8 && values {
            true => self.group * self.value_dim,
            false => self.group * ROW,
        }
    }

    /// TMA boxes of the keys of a step; values have as many or fewer.
    pub(super) fn boxes(&self) -> usize {
        self.entries() * self.spans()
    }

    /// Boxes of a step that one warp loads.
    pub(super) fn lane_boxes(&self) -> usize {
        self.boxes().div_ceil(self.warps() as usize)
    }

    pub(super) fn loading_warps(&self) -> u32 {
        self.warps().min(self.boxes() as u32)
    }

    pub(super) fn mask_words(&self) -> usize {
        self.group.div_ceil(32)
    }

    /// Bytes of the keys of a step.
    pub(super) fn stage_bytes(&self) -> usize {
        self.cols * self.spans() * ROW
    }

    /// Bytes of the values of a step.
    pub(super) fn value_bytes(&self) -> usize {
        match self.fp8 {
            true => self.cols * self.value_dim,
            false => self.cols * self.value_spans() * ROW,
        }
    }

    // Byte offsets in shared memory. The barrier of q comes first.

    pub(super) fn k_full(&self) -> u32 {
        8
    }

    pub(super) fn v_full(&self) -> u32 {
        self.k_full() + 8 * self.stages as u32
    }

    pub(super) fn k_empty(&self) -> u32 {
        self.v_full() + 8 * self.stages as u32
    }

    pub(super) fn v_empty(&self) -> u32 {
        self.k_empty() + 8 * self.stages as u32
    }

    pub(super) fn kv_head_offset(&self) -> u32 {
        self.v_empty() + 8 * self.stages as u32
    }

    pub(super) fn q_offset(&self) -> usize {
        1024
    }

    pub(super) fn k_offset(&self) -> usize {
        self.q_offset() + self.a_bytes()
    }

    pub(super) fn v_offset(&self) -> usize {
        self.k_offset() + self.stages * self.stage_bytes()
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.v_offset() + self.stages * self.value_bytes()
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f)?;
        f.write_str(if self.fp8 { ", products in E4M3" } else { "" })?;
        f.write_str(described_threshold(self.options.score, true))
    }
}

/// The comptime shape of the fused backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardTile {
    /// Type of the tensors.
    pub half: Half,
    /// Width of queries, keys and values, a multiple of 8 up to 128.
    pub dim: usize,
    /// Warpgroups, each with 64 keys: 1 or 2.
    pub warpgroups: usize,
    /// Queries of a step: 64 or 128.
    pub cols: usize,
    /// Consecutive positions an entry names.
    pub group: usize,
    /// Steps that are in shared memory at a time.
    pub stages: usize,
    /// How many steps late a buffer is filled again.
    pub lag: usize,
    /// What else a call may ask for.
    pub options: Options,
    /// Whether positions are listed by residue class.
    pub residue: bool,
    /// Whether results are added to what is there.
    pub carry: bool,
    /// Whether the tile's keys are gathered from like blocks.
    pub clustered: bool,
    /// Whether cubes compute tile after tile.
    pub persistent: bool,
    /// Whether tiles that are much longer than the others add dQ to sums of their own.
    pub apart: bool,
    /// Whether who visits queries last writes their dQ, see `backward_chain`: not where mainloops are
    /// long and heads narrow, where it gains nothing.
    pub finishes: bool,
    /// Cubes that share the query heads of a head of keys: see `shares`.
    pub shares: usize,
    /// The size of blocks, where a step is one coarse entry with bits of them.
    pub coarse: Option<usize>,
    /// Whether a visit's additions to dQ are posted without a fence. The hardware adds in L2, where the counter is; PTX's memory model asks for one.
    pub unfenced: bool,
}

impl BackwardTile {
    fn sum_width(&self) -> usize {
        self.dim
    }

    fn coarse(&self) -> Option<usize> {
        self.coarse
    }

    fn row_groups(&self) -> usize {
        self.warpgroups
    }

    /// How the layout is cut.
    pub fn tiling(&self) -> Tiling {
        Tiling {
            clustered: self.clustered,
            visits: true,
            apart: self.apart,
            coarse: self.coarse.is_some(),
            ..Tiling::new(Mainloop::Columns, self.rows(), self.cols)
        }
    }

    /// Words of an entry.
    pub(super) fn entry_words(&self) -> usize {
        self.tiling().entry_words()
    }

    pub(super) fn bits(&self) -> Option<BitShape> {
        BitShape::of(self.coarse, self.tiling())
    }

    pub(super) fn pairs(&self) -> PairShape {
        self.pairs_of(self.tiling())
    }

    /// Columns in shared memory.
    pub(super) fn padded(&self) -> usize {
        self.spans() * ROW_ELEMENTS
    }

    /// TMA writes to multiples of 128 bytes, and the lse and delta of 8 queries have 64.
    pub(super) fn stats_bytes(&self) -> usize {
        self.entries() * (self.group * 8).max(128)
    }

    /// Where the lse and delta of the `eight`-th eight queries of a step are.
    pub(super) fn stats_eight(&self, eight: usize) -> u32 {
        eight as u32 * if self.group == 8 { 128 } else { 64 }
    }

    /// Whether dK takes ds from registers and starts before the warpgroups meet. With the 128 queries of narrow heads short mainloops would lose a fifth.
    pub(super) fn dk_first(&self) -> bool {
        self.dim > 64
    }

    /// Whether ds is made of weights in half precision: where registers are short.
    pub(super) fn packed(&self) -> bool {
        self.dim > 64 || self.cols > GROUP_ROWS
    }

    pub(super) fn ds_bytes(&self) -> usize {
        self.rows() * self.cols * 2
    }

    /// Sums of dQ.
    pub(super) fn sets(&self) -> usize {
        1 + usize::from(self.apart)
    }

    // dQ of a step: two warpgroups have half the columns each, or half the queries where a step has 128.

    /// Whether a warpgroup has half the queries of a step.
    pub(super) fn halves_queries(&self) -> bool {
        self.cols == 2 * GROUP_ROWS && self.warpgroups == 2
    }

    /// Parts of the columns, each with counters of its own.
    pub(super) fn parts(&self) -> usize {
        match self.halves_queries() {
            true => 1,
            false => self.warpgroups,
        }
    }

    /// Columns of dQ that a warpgroup computes.
    pub(super) fn dq_cols(&self) -> usize {
        self.padded() / self.parts()
    }

    /// From one warpgroup's ds to the other's.
    pub(super) fn dq_left_offset(&self) -> usize {
        match self.halves_queries() {
            true => self.rows() * ROW,
            false => 0,
        }
    }

    /// From one warpgroup's columns of the keys to the other's.
    pub(super) fn dq_right_offset(&self) -> usize {
        match (self.parts(), self.spans()) {
            (1, _) => 0,
            (_, 1) => ROW / 2,
            _ => self.rows() * ROW,
        }
    }

    pub(super) fn dq_query_offset(&self) -> usize {
        match self.halves_queries() {
            true => GROUP_ROWS,
            false => 0,
        }
    }

    /// Bytes of the sums of eight queries.
    pub(super) fn dq_eight_bytes(&self) -> usize {
        8 * self.padded() * 4
    }

    /// Tiles whose keys and values are in shared memory at a time.
    pub(super) fn own_buffers(&self) -> usize {
        1 + usize::from(self.persistent)
    }

    // Byte offsets in shared memory, barriers first.

    /// Of the tile's own rows. The stats of eight queries leave room for barriers.
    pub(super) fn own(&self) -> u32 {
        match self.group {
            8 => 64,
            _ => 0,
        }
    }

    pub(super) fn full(&self) -> u32 {
        self.own() + 8 * self.own_buffers() as u32
    }

    pub(super) fn empty(&self) -> u32 {
        self.full() + 8 * self.stages as u32
    }

    /// Of the cached records of a cube's next two tiles, 32 bytes each.
    pub(super) fn slots(&self) -> u32 {
        (self.empty() + 8 * self.stages as u32).next_multiple_of(32)
    }

    pub(super) fn stats_offset(&self) -> usize {
        match self.group {
            8 => 0,
            _ => 128,
        }
    }

    pub(super) fn k_offset(&self) -> usize {
        (self.stats_offset() + self.stages * self.stats_bytes()).next_multiple_of(1024)
    }

    pub(super) fn ds_offset(&self) -> usize {
        self.k_offset() + 2 * self.own_buffers() * self.a_bytes()
    }

    pub(super) fn q_offset(&self) -> usize {
        self.ds_offset() + 2 * self.ds_bytes()
    }

    pub(super) fn do_offset(&self) -> usize {
        self.q_offset() + self.stages * self.b_bytes()
    }

    pub(super) fn dq_offset(&self) -> usize {
        self.do_offset() + self.stages * self.b_bytes()
    }

    /// Bytes of dQ of a warp's eight queries.
    pub(super) fn warp_eight_bytes(&self) -> usize {
        8 * self.dq_cols() * 4
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.dq_offset() + 8 * self.warpgroups * self.warp_eight_bytes()
    }
}

impl fmt::Display for BackwardTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f)?;
        f.write_str(described_threshold(self.options.score, true))?;
        if self.persistent {
            write!(f, ", tile after tile")?;
        }
        if self.finishes {
            write!(f, ", dQ written by the last visit")?;
        }
        if self.apart {
            write!(f, ", long tiles with sums of dQ of their own")?;
        }
        if self.unfenced {
            write!(f, ", additions to dQ without fences")?;
        }
        match self.shares {
            1 => Ok(()),
            shares => write!(f, ", the queries of a tile shared by {shares} cubes"),
        }
    }
}
