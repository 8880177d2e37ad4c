//! The comptime shape of the backward kernels of the two mainloops.

use std::fmt;

use super::base::{Base, with_base};
use crate::shared::score::described_threshold;

/// The comptime shape of the kernels of the two mainloops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MainloopTile {
    pub base: Base,
    /// Width of values, no larger than that of keys. In shared memory they are as wide, with zeros behind.
    pub value_dim: usize,
    /// Whether two warpgroups have the same rows: one makes the weights and dV of them, the other dK. There are no registers for both in
    /// one where heads are wider than 128.
    pub shared: bool,
    /// Whether a loop over columns makes the sums over queries of the gradients of scores, of each query head, and nothing else.
    pub bias_sums: bool,
    /// Whether cubes share [long tiles](super::long_tiles), which a launch says.
    pub long_tiles: bool,
}

with_base!(MainloopTile);

impl MainloopTile {
    /// Of rows as wide as values.
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

    /// Weights that one warpgroup hands to the other, of two steps.
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

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.weights_offset() + 2 * self.weights_bytes()
    }
}

impl fmt::Display for MainloopTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f, self.shared_bytes())?;
        // Two warpgroups with the same rows would have to agree on what they leave out.
        f.write_str(described_threshold(self.score, !self.shared))?;
        match self.shared {
            true => write!(f, ", dV and dK by a warpgroup each"),
            false => Ok(()),
        }
    }
}
