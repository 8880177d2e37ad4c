//! Compile-time shape of the kernel of a bias's gradient.

use std::fmt;

use super::base::{Base, with_base};
use crate::arch::sm90::ROW;
use crate::shared::score::described_threshold;

/// A tile of pairs: one step of one tile of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PairTile {
    pub base: Base,
    /// Whether heads and batch entries with different patterns share the bias.
    pub several: bool,
    /// Whether pairs of neighbouring elements of the gradient are 8-byte aligned.
    pub wide: bool,
}

with_base!(PairTile);

impl PairTile {
    /// Returns the shape with only the bias tensor added to scores.
    pub(super) fn only_bias(&self) -> Base {
        let mut base = self.base;
        let score = &mut base.score;
        (score.softcap, score.alibi, score.relative) = (true, false, false);
        base
    }

    /// Returns the shape without the bias tensor.
    pub(super) fn other_biases(&self) -> Base {
        let mut base = self.base;
        (base.score.bias, base.wide_bias) = (false, false);
        base
    }

    /// Boxes of a product's operands.
    pub(super) fn boxes(&self) -> usize {
        self.a_boxes() + self.entries() * self.spans()
    }

    /// Bytes of a product's operands.
    pub(super) fn stage_bytes(&self) -> usize {
        (self.rows() + self.cols) * self.spans() * ROW
    }

    // Byte offsets in shared memory. The index of the tile comes first.

    pub(super) fn full(&self) -> u32 {
        8
    }

    pub(super) fn empty(&self) -> u32 {
        self.full() + 8 * self.stages as u32
    }

    pub(super) fn stages_offset(&self) -> usize {
        1024
    }

    /// Bytes of the bias of a warpgroup's pairs.
    pub(super) fn bias_bytes(&self) -> usize {
        self.rows() / self.warpgroups * self.cols * 2
    }

    /// Offset of the bias, after the stages.
    pub(super) fn bias_offset(&self) -> usize {
        self.stages_offset() + self.stages * self.stage_bytes()
    }

    /// Bytes of shared memory per cube.
    pub fn shared_bytes(&self) -> usize {
        self.bias_offset() + self.warpgroups * self.bias_bytes()
    }
}

impl fmt::Display for PairTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let like_rows = match self.clustered {
            true => ", like rows together",
            false => "",
        };
        write!(
            f,
            "hopper  {} × {} tiles gathered from {}-wide blocks{like_rows}, summed over what shares the bias, {} units, \
             {} products in {} KiB shared{}",
            self.rows(),
            self.cols,
            self.group,
            self.units(),
            self.stages,
            self.shared_bytes().div_ceil(1024),
            described_threshold(self.score, false),
        )
    }
}
