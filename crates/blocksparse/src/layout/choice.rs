//! Layouts whose blocks a tensor on a device chooses. The host knows their sizes and the maximum number of blocks.

use super::shape::LayoutShape;
use crate::rule::Rule;

/// Rule by which a device chooses the blocks of a layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceChoice {
    /// Number of batch entries and heads with their own blocks: `[batch or 1, a divisor of the heads]`. Adjacent heads share blocks.
    pub patterns: [usize; 2],
    /// True if queries see no later keys. The last query is aligned with the last key.
    pub causal: bool,
    /// Meaning of the tensor that chooses.
    pub by: BlockSource,
}

/// Contents of the tensor that chooses blocks. Block contents are per row of query blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BlockSource {
    /// A flag per key block: chosen or not.
    Mask,
    /// A list of the chosen key blocks. Indices that are not key blocks are ignored.
    Indices {
        /// Number of indices per row.
        most: usize,
    },
    /// An f32 score per key block, to which a rule is applied.
    Scores(Rule),
    /// Positions of queries and keys, from which a rule derives the visible pairs. The blocks are all blocks of the layout within which the choice is made.
    Positions(PositionMask),
    /// Like `Positions`, for keys that are at their queries' positions: the tensor stores each position once.
    OwnPositions(PositionMask),
    /// The keys that each query sees: ascending, without duplicates, padded with negative numbers. The blocks are all blocks of the layout within which the
    /// choice is made.
    Keys {
        /// Number of elements per query.
        most: usize,
    },
}

impl BlockSource {
    /// Returns whether the blocks are all those of the layout within which the choice is made, so that the tensor only determines their pairs.
    pub fn has_all_blocks(&self) -> bool {
        match self {
            Self::Positions(_) | Self::OwnPositions(_) | Self::Keys { .. } => true,
            Self::Mask | Self::Indices { .. } | Self::Scores(_) => false,
        }
    }
}

/// Keys that a query sees, determined by the positions of both. A negative position means none: such a query sees nothing, and no query sees such a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PositionMask {
    /// Keys at earlier positions.
    Before,
    /// Keys at earlier positions and at the query's own position.
    UpTo,
    /// Keys at all positions but the query's own.
    Others,
}

impl PositionMask {
    /// Returns whether a query at one position sees a key at another.
    pub fn sees(self, query: i32, key: i32) -> bool {
        query >= 0
            && key >= 0
            && match self {
                Self::Before => key < query,
                Self::UpTo => key <= query,
                Self::Others => key != query,
            }
    }
}

/// Maximum number of block rows in a tile of chosen blocks: the tile's masks are a table over all subsets of its rows.
pub const TALLEST: usize = 8;

impl DeviceChoice {
    /// Returns the number of positions of a batch entry and head and the index of the first key's position, if a position rule chooses. Key positions follow
    /// those of the queries, or are the same elements.
    pub fn positions(&self, shape: &LayoutShape) -> Option<[usize; 2]> {
        match self.by {
            BlockSource::Positions(_) => Some([shape.seq_q + shape.seq_kv, shape.seq_q]),
            BlockSource::OwnPositions(_) => Some([shape.seq_q, 0]),
            BlockSource::Mask
            | BlockSource::Indices { .. }
            | BlockSource::Scores(_)
            | BlockSource::Keys { .. } => None,
        }
    }

    /// Returns the maximum number of blocks in a row of query blocks.
    #[doc(hidden)]
    pub fn most_blocks(&self, shape: &LayoutShape) -> usize {
        let all = shape.seq_kv.div_ceil(shape.block_size);
        let most = match self.by {
            BlockSource::Mask => all,
            BlockSource::Indices { most } => most,
            BlockSource::Scores(rule) => rule.most_blocks(all),
            BlockSource::Positions(_) | BlockSource::OwnPositions(_) | BlockSource::Keys { .. } => {
                all
            }
        };
        most.min(all)
    }
}
