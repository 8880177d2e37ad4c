//! Shape of a cube's mainloop, and its shared memory layout. Its rows are the heads of a query, or of adjacent queries, which share a list.

use cubecl::prelude::*;

use blocksparse_cubecl::mma::tile::Tile;

/// Bytes at the start of shared memory: a word per stage with a bit per existing key, for up to 32 stages.
const BITS: usize = 128;

/// Bytes of shared memory that a multiprocessor reserves per cube.
pub const RESERVED: usize = 1024;

/// Compile-time shape of a mainloop of queries, part of the key in the cache of compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MainloopTile {
    /// Rows of one query, and steps of its keys. Of the fields only sizes, `far_rows` and `carry` are used.
    pub inner: Tile,
    /// Number of heads that share a list, which are the rows. Padding rows repeat the last head and are not written.
    pub heads: usize,
    /// Number of adjacent keys per list entry.
    pub block: usize,
    /// True if rows of the output's gradient lie next to those of queries.
    pub backward: bool,
}

impl MainloopTile {
    /// Returns the offset of the first stage.
    pub fn ring_offset(&self) -> usize {
        BITS
    }

    /// Returns the bytes of a step's keys and values, which are adjacent.
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

    /// Returns the assignment of rows to heads.
    pub fn cube_rows(&self) -> CubeRows {
        CubeRows::of_query(self.heads, self.inner.rows())
    }

    /// Returns the width of the output.
    pub fn out_dim(&self) -> usize {
        match self.backward {
            true => self.inner.head_dim,
            false => self.inner.value_dim,
        }
    }

    /// Returns whether the query's rows stay in registers.
    pub fn kept(&self) -> bool {
        self.inner.warp_tiles == 1
    }

    /// Returns the number of operands of rows of this width in registers, or 1 if they are not kept.
    pub fn kept_depth(&self, dim: usize) -> usize {
        match self.kept() {
            true => self.inner.depth(dim),
            false => 1,
        }
    }

    /// Returns whether the rows are loaded through the memory of the last stage, which is not in use before.
    fn staged(&self) -> bool {
        self.kept() && self.own_bytes() <= self.step_bytes()
    }

    /// Returns the offset of the query's rows of width head_dim.
    pub fn own_offset(&self) -> usize {
        let stages = self.inner.stages - usize::from(self.staged());
        self.ring_offset() + stages * self.step_bytes()
    }

    /// Returns the offset of the rows of width value_dim, which only the backward pass has.
    pub fn second_offset(&self) -> usize {
        self.own_offset() + self.inner.rows() * self.inner.pitch(self.inner.head_dim)
    }

    /// Returns the bytes of a cube's shared memory.
    pub fn shared_bytes(&self) -> usize {
        let ring = self.ring_offset() + self.inner.stages * self.step_bytes();
        match self.staged() {
            true => ring,
            false => ring + self.own_bytes(),
        }
    }
}

/// Rows of a cube: heads that share a list, for `queries` adjacent queries, and padding, which repeats the last row and is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CubeRows {
    pub heads: usize,
    pub queries: usize,
    pub rows: usize,
}

impl CubeRows {
    /// Creates the rows of a single query.
    pub fn of_query(heads: usize, rows: usize) -> Self {
        Self {
            heads,
            queries: 1,
            rows,
        }
    }

    fn filled(&self) -> usize {
        self.heads * self.queries
    }
}

/// Lists of a launch: of one query each, or of a group of adjacent ones.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Lists {
    /// Index of the first list.
    pub first: u32,
    /// Number of lists per KV head.
    pub count: u32,
    /// Number of entries of each.
    pub most: u32,
}

/// Entries of the lists.
#[derive(CubeType, CubeLaunch)]
pub struct ListTensors {
    /// Listed keys or blocks, i32, negative for empty entries.
    pub keys: Box<[i32]>,
    /// Bit masks of the queries that listed each entry; not read if a list is of one query.
    pub masks: Box<[u32]>,
    /// Number of entries of each list; not read if a list is of one query.
    pub counts: Box<[u32]>,
}

/// Returns how many of a group's queries exist.
#[cube]
pub fn queries_from(first: u32, seq_q: u32, #[comptime] t: CubeRows) -> u32 {
    if comptime!(t.queries == 1) {
        1u32.runtime()
    } else {
        min(comptime!(t.queries as u32).runtime(), seq_q - first)
    }
}

/// Returns the query of a row within the group, of which `queries` exist.
#[cube]
pub fn query_of_row(row: u32, queries: u32, #[comptime] t: CubeRows) -> u32 {
    if comptime!(t.queries == 1) {
        0u32.runtime()
    } else {
        min(row / comptime!(t.heads as u32), queries - 1)
    }
}

/// Returns the head of a row, among those that share the list.
#[cube]
pub fn head_of_row(row: u32, #[comptime] t: CubeRows) -> u32 {
    let mut filled = row;
    if comptime!(t.filled() < t.rows) {
        filled = min(row, comptime!(t.filled() as u32 - 1));
    }
    if comptime!(t.queries > 1) {
        filled %= comptime!(t.heads as u32);
    }
    filled
}

/// Returns the offset of a row in a contiguous tensor, in rows from that of the first query and head.
#[cube]
pub fn place_of_row(row: u32, seq_q: u32, queries: u32, #[comptime] t: CubeRows) -> u32 {
    head_of_row(row, t) * seq_q + query_of_row(row, queries, t)
}

/// Returns whether a row belongs to a head of an existing query, and so is written.
#[cube]
pub fn is_written(row: u32, queries: u32, #[comptime] t: CubeRows) -> bool {
    if comptime!(t.queries == 1 && t.filled() == t.rows) {
        true.runtime()
    } else {
        row < queries * comptime!(t.heads as u32)
    }
}
