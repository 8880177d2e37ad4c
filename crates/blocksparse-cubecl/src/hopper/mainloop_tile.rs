//! The comptime shape of the backward kernels of the two mainloops.

use std::fmt;

use super::gradient::StoreShape;
use super::options::{Options, PairShape};
use crate::arch::sm90::Half;
use crate::shared::score::described_threshold;
use blocksparse::plan::{Mainloop, Tiling};

/// The comptime shape of the kernels of the two mainloops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MainloopTile {
    /// Type of the tensors.
    pub half: Half,
    /// Width of queries and keys, a multiple of 8.
    pub dim: usize,
    /// Width of values, no larger. In shared memory they are as wide as keys, with zeros behind.
    pub value_dim: usize,
    /// Warpgroups, each with 64 rows unless they are shared: 1 or 2.
    pub warpgroups: usize,
    /// Whether two warpgroups have the same rows: one makes the weights and dV of them, the other dK. There are no registers for both in
    /// one where heads are wider than 128.
    pub shared: bool,
    /// Columns of a step.
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
    /// Whether the tile's rows are gathered from like blocks.
    pub clustered: bool,
    /// Whether a loop over columns makes the sums over queries of the gradients of scores, of each query head, and nothing else.
    pub bias_sums: bool,
    /// Whether cubes share [long tiles](super::long_tiles), which a launch says.
    pub long_tiles: bool,
}

impl MainloopTile {
    pub(super) fn sum_width(&self) -> usize {
        self.dim
    }

    /// Entries of mainloops are gathered.
    pub(super) fn coarse(&self) -> Option<usize> {
        None
    }

    /// Warpgroups with rows of their own.
    pub(super) fn row_groups(&self) -> usize {
        match self.shared {
            true => 1,
            false => self.warpgroups,
        }
    }

    /// How the layout is cut.
    pub fn tiling(&self, mainloop: Mainloop) -> Tiling {
        Tiling {
            clustered: self.clustered,
            ..Tiling::new(mainloop, self.rows(), self.cols)
        }
    }

    pub(super) fn entry_words(&self) -> usize {
        self.tiling(Mainloop::Columns).entry_words()
    }

    pub(super) fn pairs(&self, mainloop: Mainloop) -> PairShape {
        self.pairs_of(self.tiling(mainloop))
    }

    /// How dV is stored.
    pub(super) fn store_values(&self) -> StoreShape {
        StoreShape {
            dim: self.value_dim,
            ..self.store()
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
        self.describe(f)?;
        // Two warpgroups with the same rows would have to agree on what they leave out.
        f.write_str(described_threshold(self.options.score, !self.shared))?;
        match self.shared {
            true => write!(f, ", dV and dK by a warpgroup each"),
            false => Ok(()),
        }
    }
}
