//! The rows of a cube: the heads of a query, or those of neighbouring queries, which share a list.

use cubecl::prelude::*;

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
