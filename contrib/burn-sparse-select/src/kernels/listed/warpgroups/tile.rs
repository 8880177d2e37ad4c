//! Shape of a mainloop on wgmma, and its shared memory layout.

use crate::kernels::listed::tile::CubeRows;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::swizzled::Spans;

/// Number of rows of a warpgroup's matmul.
pub const GROUP_ROWS: usize = 64;

/// Number of stages: one is multiplied, the next is copied, and a warpgroup may still read the one before.
pub const STAGES: usize = 3;

/// Bytes after the stages for their barriers.
const BARRIERS: usize = 32;

/// Bytes of the masks of the keys that a query listed, a word per warp.
pub const QUERY_WORDS: usize = 32;

/// Compile-time shape of a mainloop of queries on wgmma, part of the key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WarpgroupTile {
    pub half: Half,
    /// Width of queries and keys, a multiple of 64.
    pub head_dim: usize,
    /// Width of values, a multiple of 64.
    pub value_dim: usize,
    /// Number of warpgroups, with 64 rows each.
    pub warpgroups: usize,
    /// Number of keys of a step.
    pub cols: usize,
    /// Number of heads that share a list, which are the rows. Padding rows repeat the last head and are not written.
    pub heads: usize,
    /// Number of adjacent queries that share a list: the rows of each follow those of the one before.
    pub queries: usize,
    /// Number of adjacent keys per list entry.
    pub block: usize,
    /// True to continue attention to other keys, which is in the outputs.
    pub carry: bool,
    /// True if rows of the output's gradient follow those of queries.
    pub backward: bool,
    /// True if rows of keys or values are more than 4 GB apart.
    pub far_rows: bool,
}

impl WarpgroupTile {
    pub fn warps(&self) -> usize {
        4 * self.warpgroups
    }

    pub fn units(&self) -> usize {
        32 * self.warps()
    }

    pub fn rows(&self) -> usize {
        GROUP_ROWS * self.warpgroups
    }

    /// Returns the width of the output.
    pub fn out_dim(&self) -> usize {
        match self.backward {
            true => self.head_dim,
            false => self.value_dim,
        }
    }

    /// Returns the number of registers of sums of `dim` columns: a vector has a power of two of them.
    pub fn sums(dim: usize) -> usize {
        (dim / 2).next_power_of_two()
    }

    /// Returns the assignment of rows to heads and queries.
    pub fn cube_rows(&self) -> CubeRows {
        CubeRows {
            heads: self.heads,
            queries: self.queries,
            rows: self.rows(),
        }
    }

    /// Returns the number of keys of a step that a warp copies.
    pub fn warp_keys(&self) -> usize {
        self.cols / self.warps()
    }

    /// Returns a warp's mask if all of its keys exist.
    pub fn all(&self) -> u32 {
        match self.warp_keys() {
            32 => u32::MAX,
            keys => (1 << keys) - 1,
        }
    }

    /// Returns the layout of the query's rows of width head_dim, at the start.
    pub fn own(&self) -> Spans {
        Spans::far(self.rows(), self.head_dim)
    }

    /// Returns the layout of the rows of width value_dim after them, which only the backward pass has.
    pub fn second(&self) -> Spans {
        Spans::far(self.rows(), self.value_dim)
    }

    /// Returns the layout of the keys of a step.
    pub fn keys(&self) -> Spans {
        Spans {
            rows: self.cols,
            dim: self.head_dim,
            far: self.far_rows,
        }
    }

    /// Returns the layout of the values of a step, after its keys.
    pub fn values(&self) -> Spans {
        Spans {
            dim: self.value_dim,
            ..self.keys()
        }
    }

    pub fn step_bytes(&self) -> usize {
        self.keys().bytes() + self.values().bytes()
    }

    pub fn ring_offset(&self) -> usize {
        let second = match self.backward {
            true => self.second().bytes(),
            false => 0,
        };
        self.own().bytes() + second
    }

    /// Returns the offset of the stages' barriers.
    pub fn full(&self) -> u32 {
        (self.ring_offset() + STAGES * self.step_bytes()) as u32
    }

    /// Returns the offset of the masks: per stage and query, a word per warp.
    pub fn words(&self) -> u32 {
        self.full() + BARRIERS as u32
    }

    /// Returns the bytes of a stage's masks.
    pub fn step_words(&self) -> usize {
        QUERY_WORDS * self.queries
    }

    /// Returns the bytes of a cube's shared memory.
    pub fn shared_bytes(&self) -> usize {
        self.full() as usize + BARRIERS + STAGES * self.step_words()
    }
}
