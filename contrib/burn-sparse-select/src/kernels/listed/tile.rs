//! The shape of a cube's mainloop, and where its parts lie in shared memory.

use crate::kernels::listed::rows::CubeRows;
use blocksparse_cubecl::mma::tile::Tile;

/// Bytes at the beginning of shared memory: for each step that is there, which of its keys exist, a bit each; of 32 steps.
const BITS: usize = 128;

/// Bytes of shared memory of a multiprocessor that a cube takes besides its own.
pub const RESERVED: usize = 1024;

/// The comptime shape of a mainloop of queries: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MainloopTile {
    /// Rows of one query, and steps of its keys. Of the fields only sizes, `far_rows` and `carry` count.
    pub inner: Tile,
    /// Heads that share its list: its rows, but for those that fill the last matrix, which repeat the last head's and are not written.
    pub heads: usize,
    /// Neighbouring keys that a number of a list names.
    pub block: usize,
    /// Whether rows of the output's gradient lie beside those of queries.
    pub backward: bool,
}

impl MainloopTile {
    /// Where the first step is.
    pub fn ring_offset(&self) -> usize {
        BITS
    }

    /// Bytes of a step's keys and values, which follow each other.
    pub fn step_bytes(&self) -> usize {
        self.inner.b1_bytes() + self.inner.b2_bytes()
    }

    fn own_bytes(&self) -> usize {
        let second = match self.backward {
            true => self.inner.pitch(self.inner.value_dim),
            false => 0,
        };
        self.inner.rows() * (self.inner.pitch(self.inner.head_dim) + second)
    }

    /// Which of the rows are heads.
    pub fn cube_rows(&self) -> CubeRows {
        CubeRows::of_query(self.heads, self.inner.rows())
    }

    /// The width of what is written.
    pub fn out_dim(&self) -> usize {
        match self.backward {
            true => self.inner.head_dim,
            false => self.inner.value_dim,
        }
    }

    /// Whether the query's rows stay in registers.
    pub fn kept(&self) -> bool {
        self.inner.warp_tiles == 1
    }

    /// Operands of rows of a width that stay there, or one in their place.
    pub fn kept_depth(&self, dim: usize) -> usize {
        match self.kept() {
            true => self.inner.depth(dim),
            false => 1,
        }
    }

    /// Whether they get there by way of the last step's place, which nothing is copied to before.
    fn staged(&self) -> bool {
        self.kept() && self.own_bytes() <= self.step_bytes()
    }

    /// The query's rows of width head_dim.
    pub fn own_offset(&self) -> usize {
        let stages = self.inner.stages - usize::from(self.staged());
        self.ring_offset() + stages * self.step_bytes()
    }

    /// Those of width value_dim, which only the backward pass has.
    pub fn second_offset(&self) -> usize {
        self.own_offset() + self.inner.rows() * self.inner.pitch(self.inner.head_dim)
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        let ring = self.ring_offset() + self.inner.stages * self.step_bytes();
        match self.staged() {
            true => ring,
            false => ring + self.own_bytes(),
        }
    }
}
