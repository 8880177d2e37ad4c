//! What crosses backends of choices by content.

use burn_blocksparse::op_values;

/// Request for the highest-scoring blocks of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopKBlocks {
    /// The position of the first query of the scores; the first key's is 0.
    pub position: i64,
    /// Keys of a block.
    pub block: usize,
    /// Blocks that a query takes, at most.
    pub most: usize,
}

/// Request for the listed keys that queries see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UniqueKeys {
    /// Keys that there are.
    pub seq_kv: usize,
    /// True if a query sees none after its own position; the last query sits at the last key.
    pub causal: bool,
}

impl UniqueKeys {
    /// So many keys a query of `seq_q` sees, from the first on.
    pub fn seen(&self, query: usize, seq_q: usize) -> usize {
        match self.causal {
            true => (query + 1 + self.seq_kv)
                .saturating_sub(seq_q)
                .min(self.seq_kv),
            false => self.seq_kv,
        }
    }
}

/// The sizes of lists of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueryTiles {
    /// Blocks of keys.
    pub blocks: usize,
    /// Tiles of a list, as many as all choices need.
    pub tiles: usize,
    /// Places of a tile.
    pub tile: usize,
}

op_values! {
    /// Queries by the blocks that they chose: i32, −1 for none.
    pub struct QueriesOfBlocks {
        /// The place of each choice: `[batch, lists, queries, most]`.
        pub places: IntTensor,
        /// The choice at each place: `[batch, lists, tiles · tile]`.
        pub choices: IntTensor,
        /// The block of each tile: `[batch, lists, tiles]`.
        pub tile_blocks: IntTensor,
    }

    /// The top-k of rows, i32.
    pub struct TopKLists {
        /// Their columns, ascending: `[groups, rows, most]`.
        pub columns: IntTensor,
        /// Of each number `row · most` and its place in the row's list, or −1: `[groups, rows, columns]`.
        pub places: IntTensor,
    }
}
