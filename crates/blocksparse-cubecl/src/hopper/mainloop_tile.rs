//! Compile-time shape of the kernels of the two mainloops.

use std::fmt;

use super::base::{Base, with_base};
use crate::shared::score::described_threshold;

/// Compile-time shape of the kernels of the two mainloops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MainloopTile {
    pub base: Base,
    /// Width of values, at most that of keys. In shared memory they are padded with zeros to the width of keys.
    pub value_dim: usize,
    /// Whether two warpgroups have the same rows: one computes the weights and dV, the other dK. For heads wider than 128, one warpgroup does not have the
    /// registers for both.
    pub shared: bool,
    /// Whether a loop over columns only computes the sums of the gradients of scores over the queries of each query head.
    pub bias_sums: bool,
    /// Whether several cubes share [long tiles](super::long_tiles). Set at launch.
    pub long_tiles: bool,
}

with_base!(MainloopTile);

impl MainloopTile {
    /// Returns the shape for rows of values.
    pub(super) fn of_values(&self) -> Base {
        Base {
            dim: self.value_dim,
            ..self.base
        }
    }

    pub(super) fn stats_bytes(&self) -> usize {
        self.cols * 8
    }

    // Byte offsets in shared memory. The barrier of the tile's own rows comes first.

    pub(super) fn full(&self) -> u32 {
        8
    }

    pub(super) fn empty(&self) -> u32 {
        self.full() + 8 * self.stages as u32
    }

    pub(super) fn stats_offset(&self) -> usize {
        1024
    }

    pub(super) fn a1_offset(&self) -> usize {
        (self.stats_offset() + self.stages * self.stats_bytes()).next_multiple_of(1024)
    }

    pub(super) fn a2_offset(&self) -> usize {
        self.a1_offset() + self.a_bytes()
    }

    pub(super) fn b1_offset(&self) -> usize {
        self.a2_offset() + self.a_bytes()
    }

    pub(super) fn b2_offset(&self) -> usize {
        self.b1_offset() + self.stages * self.b_bytes()
    }

    /// Offset of the weights of two steps, which one warpgroup passes to the other.
    pub(super) fn weights_offset(&self) -> usize {
        self.b2_offset() + self.stages * self.b_bytes()
    }

    /// Bytes of the weights of a step.
    pub(super) fn weights_bytes(&self) -> usize {
        match self.shared {
            true => self.rows() * self.cols * 2,
            false => 0,
        }
    }

    /// Bytes of shared memory per cube.
    pub fn shared_bytes(&self) -> usize {
        self.weights_offset() + 2 * self.weights_bytes()
    }
}

impl fmt::Display for MainloopTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f, self.shared_bytes())?;
        // Two warpgroups with the same rows would have to agree on the steps to skip.
        f.write_str(described_threshold(self.score, !self.shared))?;
        match self.shared {
            true => write!(f, ", dV and dK by a warpgroup each"),
            false => Ok(()),
        }
    }
}
