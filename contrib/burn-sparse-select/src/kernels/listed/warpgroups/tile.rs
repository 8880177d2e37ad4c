//! The shape of a mainloop on wgmma, and where its parts lie in shared memory.

use crate::kernels::listed::tile::CubeRows;
use blocksparse_cubecl::arch::ptx::Half;
use blocksparse_cubecl::arch::swizzled::Spans;

/// Rows of a warpgroup's product.
pub const GROUP_ROWS: usize = 64;

/// Steps that there is room for: of one keys and values are multiplied, the next is on its way, and a warpgroup may still read the one before.
pub const STAGES: usize = 3;

/// Bytes behind the steps: a barrier for each,
const BARRIERS: usize = 32;

/// and which of its keys a query listed, a word of each warp.
pub const QUERY_WORDS: usize = 32;

/// The comptime shape of a mainloop of queries on wgmma: its key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WarpgroupTile {
    /// The type of the tensors.
    pub half: Half,
    /// Width of queries and keys, a multiple of 64.
    pub head_dim: usize,
    /// Width of values, a multiple of 64.
    pub value_dim: usize,
    /// Warpgroups, 64 rows each.
    pub warpgroups: usize,
    /// Keys of a step.
    pub cols: usize,
    /// Heads that share a list: rows, but for those that fill the last product, which repeat the last head's and are not written.
    pub heads: usize,
    /// Neighbouring queries that share a list: the rows of each follow those of the one before.
    pub queries: usize,
    /// Neighbouring keys that a number of a list names.
    pub block: usize,
    /// Whether attention to other keys, which is in the outputs, is carried on.
    pub carry: bool,
    /// Whether rows of the output's gradient lie behind those of queries.
    pub backward: bool,
    /// Whether rows of keys or values are more than 4 GB apart.
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

    /// The width of what is written.
    pub fn out_dim(&self) -> usize {
        match self.backward {
            true => self.head_dim,
            false => self.value_dim,
        }
    }

    /// Registers of sums of so many columns: a vector has a power of two of them.
    pub fn sums(dim: usize) -> usize {
        (dim / 2).next_power_of_two()
    }

    /// Which of the rows are whose.
    pub fn cube_rows(&self) -> CubeRows {
        CubeRows {
            heads: self.heads,
            queries: self.queries,
            rows: self.rows(),
        }
    }

    /// Keys of a step that a warp copies.
    pub fn warp_keys(&self) -> usize {
        self.cols / self.warps()
    }

    /// What a warp's word says where all of its keys exist.
    pub fn all(&self) -> u32 {
        match self.warp_keys() {
            32 => u32::MAX,
            keys => (1 << keys) - 1,
        }
    }

    /// The query's rows of width head_dim, at the beginning,
    pub fn own(&self) -> Spans {
        Spans::far(self.rows(), self.head_dim)
    }

    /// and behind them those of width value_dim, which only the backward pass has.
    pub fn second(&self) -> Spans {
        Spans::far(self.rows(), self.value_dim)
    }

    /// The keys of a step,
    pub fn keys(&self) -> Spans {
        Spans {
            rows: self.cols,
            dim: self.head_dim,
            far: self.far_rows,
        }
    }

    /// and its values behind them.
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

    /// The barriers of steps that are there.
    pub fn full(&self) -> u32 {
        (self.ring_offset() + STAGES * self.step_bytes()) as u32
    }

    /// The words of the warps for the first step and the first query, and so on.
    pub fn words(&self) -> u32 {
        self.full() + BARRIERS as u32
    }

    /// Bytes of a step's words.
    pub fn step_words(&self) -> usize {
        QUERY_WORDS * self.queries
    }

    /// Bytes of shared memory of a cube.
    pub fn shared_bytes(&self) -> usize {
        self.full() as usize + BARRIERS + STAGES * self.step_words()
    }
}
