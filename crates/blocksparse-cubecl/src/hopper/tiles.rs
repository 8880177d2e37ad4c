//! Compile-time shapes of the kernels, and offsets of their parts in shared memory.

use std::fmt;

use super::base::{Base, GROUP_ROWS, registers, with_base};
pub use super::mainloop_tile::MainloopTile;
use crate::arch::sm90::{ProductShape, ROW, ROW_ELEMENTS};
use crate::shared::score::described_threshold;

with_base!(Tile, BackwardTile);

/// Compile-time shape of the forward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    pub base: Base,
    /// Whether products are of E4M3.
    pub fp8: bool,
    /// Width of values, at most that of keys.
    pub value_dim: usize,
    /// Whether a step's second product overlaps the next step's softmax.
    pub overlap: bool,
    /// Whether each row's largest score is written.
    pub max_scores: bool,
    /// Whether the tiles of all heads start in turn, longest first, instead of head after head.
    pub heads_in_turn: bool,
}

impl Tile {
    /// Registers of a unit's sums.
    pub(super) fn sums(&self) -> usize {
        registers(self.value_dim)
    }

    /// Whether registers suffice for a step's masks while its scores are computed.
    pub(super) fn early_masks(&self) -> bool {
        self.overlap || self.value_dim <= 64
    }

    /// Whether the warpgroups alternate at the tensor cores.
    pub(super) fn turns(&self) -> bool {
        self.warpgroups == 2 && self.overlap
    }

    /// Whether registers suffice for a step's second product in addition to the sums, if nothing overlaps.
    pub(super) fn sums_apart(&self) -> bool {
        self.value_dim <= 128 && !self.fp8
    }

    /// Registers of a unit's weights of a step as an operand.
    pub(super) fn weights(&self) -> usize {
        self.cols / if self.fp8 { 8 } else { 4 }
    }

    /// Returns the shape of the first product.
    pub(super) fn first_product(&self) -> ProductShape {
        ProductShape {
            fp8: self.fp8,
            ..self.scores(self.dim)
        }
    }

    /// Spans of 64 columns of values in shared memory.
    pub(super) fn value_spans(&self) -> usize {
        match self.fp8 {
            true => 1,
            false => self.value_dim.div_ceil(ROW_ELEMENTS),
        }
    }

    /// Bytes between the boxes of consecutive entries of a step's keys or values.
    pub(super) fn box_bytes(&self, values: bool) -> usize {
        match self.fp8 && values {
            true => self.group * self.value_dim,
            false => self.group * ROW,
        }
    }

    /// TMA boxes of the keys of a step. Values have as many or fewer.
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
        self.k_offset() + self.stages * self.b_bytes()
    }

    /// Bytes of shared memory per cube.
    pub fn shared_bytes(&self) -> usize {
        self.v_offset() + self.stages * self.value_bytes()
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f, self.shared_bytes())?;
        f.write_str(if self.fp8 { ", products in E4M3" } else { "" })?;
        f.write_str(described_threshold(self.score, true))
    }
}

/// Compile-time shape of the fused backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardTile {
    /// Shared shape. Its tiling also has whether tiles that are much longer than the others add dQ to a second scratch.
    pub base: Base,
    /// Whether cubes compute tile after tile.
    pub persistent: bool,
    /// Whether the last visitor of queries writes their dQ: see `backward_chain`. Not used for long mainloops and narrow heads, where it gains nothing.
    pub finishes: bool,
    /// Number of cubes that share the query heads of a head of keys: see `shares`.
    pub shares: usize,
    /// Whether a visit's additions to dQ are posted without a fence. The hardware adds in L2, where the counter is too, but PTX's memory model requires a
    /// fence.
    pub unfenced: bool,
}

impl BackwardTile {
    /// Columns in shared memory.
    pub(super) fn padded(&self) -> usize {
        self.spans() * ROW_ELEMENTS
    }

    /// Bytes of a step's stats. TMA writes to multiples of 128 bytes, and the lse and delta of 8 queries are 64 bytes.
    pub(super) fn stats_bytes(&self) -> usize {
        self.entries() * (self.group * 8).max(128)
    }

    /// Returns the offset of the lse and delta of a group of eight queries of a step.
    pub(super) fn stats_eight(&self, eight: usize) -> u32 {
        eight as u32 * if self.group == 8 { 128 } else { 64 }
    }

    /// Whether dK takes ds from registers and starts before the barrier of the warpgroups. With the 128 queries of narrow heads, short mainloops would get
    /// 20% slower.
    pub(super) fn dk_first(&self) -> bool {
        self.dim > 64
    }

    /// Whether ds is computed from weights in half precision, because registers are short.
    pub(super) fn packed(&self) -> bool {
        self.dim > 64 || self.cols > GROUP_ROWS
    }

    pub(super) fn ds_bytes(&self) -> usize {
        self.rows() * self.cols * 2
    }

    /// Number of scratches for dQ.
    pub(super) fn sets(&self) -> usize {
        1 + usize::from(self.apart)
    }

    // dQ of a step: each of two warpgroups has half the columns, or half the queries if a step has 128.

    /// Whether a warpgroup has half the queries of a step.
    pub(super) fn halves_queries(&self) -> bool {
        self.cols == 2 * GROUP_ROWS && self.warpgroups == 2
    }

    /// Parts of the columns, each with its own counters.
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

    /// Bytes between the warpgroups' parts of ds.
    pub(super) fn dq_left_offset(&self) -> usize {
        match self.halves_queries() {
            true => self.rows() * ROW,
            false => 0,
        }
    }

    /// Bytes between the warpgroups' columns of the keys.
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

    /// Offset of the barriers of the tile's own rows. Groups of eight queries leave gaps between their stats, where the barriers fit.
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

    /// Offset of the cached records of a cube's next two tiles, 32 bytes each.
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

    /// Bytes of shared memory per cube.
    pub fn shared_bytes(&self) -> usize {
        self.dq_offset() + 8 * self.warpgroups * self.warp_eight_bytes()
    }
}

impl fmt::Display for BackwardTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f, self.shared_bytes())?;
        f.write_str(described_threshold(self.score, true))?;
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
