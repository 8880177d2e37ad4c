//! Few queries of grouped heads.

use blocksparse::BlockLayout;

use crate::options::{AttentionOptions, WeightsMode};

/// Queries that fill the least tile of the tensor-core tiers.
const TILE: usize = 64;

/// The layout with the query heads of each key head in one sequence ([`BlockLayout::pack_heads`]), where queries are too few to fill a tile. Not where
/// something depends on a query's own head or place, or is returned by blocks.
pub(crate) fn packed(
    layout: &BlockLayout,
    kv_heads: usize,
    bias: bool,
    options: &AttentionOptions,
) -> Option<BlockLayout> {
    let by_query = bias || options.alibi.is_some() || options.active_dropout().is_some();
    let by_block = options.weights == WeightsMode::Store;
    if by_query || by_block || layout.heads() == kv_heads || layout.seq_q() >= TILE {
        return None;
    }
    layout.pack_heads(kv_heads)
}
