//! Values of content-based selection that cross backends.

use burn_blocksparse::op_values;

/// Request for the highest-scoring blocks of each query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopKBlocks {
    /// Position of the first query of the scores; the first key's is 0.
    pub position: i64,
    /// Number of keys of a block.
    pub block: usize,
    /// Upper bound of the blocks that a query selects.
    pub most: usize,
}

/// Request for the listed keys that queries see, without duplicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UniqueKeys {
    /// Number of keys of the sequence.
    pub seq_kv: usize,
    /// True if a query does not see keys after its own position. The last query is at the position of the last key.
    pub causal: bool,
}

impl UniqueKeys {
    /// Returns how many keys a query sees, from the first on.
    pub fn seen(&self, query: usize, seq_q: usize) -> usize {
        match self.causal {
            true => (query + 1 + self.seq_kv)
                .saturating_sub(seq_q)
                .min(self.seq_kv),
            false => self.seq_kv,
        }
    }
}

/// Sizes of the inverse lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueryTiles {
    /// Number of key blocks.
    pub blocks: usize,
    /// Number of tiles of a list, enough for all selections.
    pub tiles: usize,
    /// Number of places of a tile.
    pub tile: usize,
}

op_values! {
    /// Queries grouped by the blocks they selected: i32, −1 for empty entries.
    pub struct QueriesOfBlocks {
        /// Place of each selection: `[batch, lists, queries, most]`.
        pub places: IntTensor,
        /// Selection at each place: `[batch, lists, tiles · tile]`.
        pub choices: IntTensor,
        /// Block of each tile: `[batch, lists, tiles]`.
        pub tile_blocks: IntTensor,
    }

    /// Top-k of rows, i32.
    pub struct TopKLists {
        /// Selected columns, ascending: `[groups, rows, most]`.
        pub columns: IntTensor,
        /// For each element `row · most` plus its index in the row's list, or −1: `[groups, rows, columns]`.
        pub places: IntTensor,
    }
}
