//! The shape of a cube's mainloop, and where its parts lie in shared memory. Its rows are the heads of a query, or those of neighbouring queries, which share a list.

use cubecl::prelude::*;

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

/// So many heads that share a list, of so many queries one behind the other, and what fills them up, which repeats the last row and is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CubeRows {
    pub heads: usize,
    pub queries: usize,
    pub rows: usize,
}

impl CubeRows {
    /// Of a query alone.
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

/// The lists of a launch: those of a query each, or of a group of neighbouring ones.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Lists {
    /// The group of the first.
    pub first: u32,
    /// How many a head of keys has.
    pub count: u32,
    /// Numbers of each.
    pub most: u32,
}

/// What these are.
#[derive(CubeType, CubeLaunch)]
pub struct ListTensors {
    /// The keys or blocks that a list names, i32, negative for none,
    pub keys: Box<[i32]>,
    /// and which of the queries that share the list named each; nothing reads it where a list is of one query.
    pub masks: Box<[u32]>,
    /// Numbers of each list, likewise.
    pub counts: Box<[u32]>,
}

/// How many of a group's queries there are, from its first on.
#[cube]
pub fn queries_from(first: u32, seq_q: u32, #[comptime] t: CubeRows) -> u32 {
    if comptime!(t.queries == 1) {
        1u32.runtime()
    } else {
        min(comptime!(t.queries as u32).runtime(), seq_q - first)
    }
}

/// The query of a row, among the group's, of which so many exist.
#[cube]
pub fn query_of_row(row: u32, queries: u32, #[comptime] t: CubeRows) -> u32 {
    if comptime!(t.queries == 1) {
        0u32.runtime()
    } else {
        min(row / comptime!(t.heads as u32), queries - 1)
    }
}

/// The head of a row, among those that share the list.
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

/// Where a row is in a contiguous tensor, from that of the first query and head on.
#[cube]
pub fn place_of_row(row: u32, seq_q: u32, queries: u32, #[comptime] t: CubeRows) -> u32 {
    head_of_row(row, t) * seq_q + query_of_row(row, queries, t)
}

/// Whether a row is a head's of a query that there is, and so to be written.
#[cube]
pub fn is_written(row: u32, queries: u32, #[comptime] t: CubeRows) -> bool {
    if comptime!(t.queries == 1 && t.filled() == t.rows) {
        true.runtime()
    } else {
        row < queries * comptime!(t.heads as u32)
    }
}
