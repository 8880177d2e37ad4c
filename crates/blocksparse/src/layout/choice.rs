//! Layouts whose blocks a tensor on a device chooses: the host knows their sizes and how many blocks there can be.

use super::shape::LayoutShape;
use crate::rule::Rule;

/// Rule by which blocks of a layout are chosen on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceChoice {
    /// Batch entries and heads that have blocks of their own: `[batch or 1, a divisor of the heads]`. Adjacent heads share.
    pub patterns: [usize; 2],
    /// True if queries see no later keys. The last query sits at the last key.
    pub causal: bool,
    /// The tensor that chooses.
    pub by: BlockSource,
}

/// Contents of the tensor that chooses blocks, for each row of query blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BlockSource {
    /// Of each key block, whether it is chosen.
    Mask,
    /// The key blocks that are chosen; what is no key block counts for nothing.
    Indices {
        /// Indices of a row.
        most: usize,
    },
    /// Of each key block a score in f32, by which a rule chooses.
    Scores(Rule),
    /// Nothing of blocks, which are all those of the layout that the choice is made within; of queries and keys their positions, of which a rule says what
    /// is seen.
    Positions(PositionMask),
    /// The same where each key is at its query's position, which is there once.
    OwnPositions(PositionMask),
    /// Nothing of blocks, likewise; of every query the keys that it sees, ascending, each once, and negative numbers after the last.
    Keys {
        /// Elements of a query.
        most: usize,
    },
}

impl BlockSource {
    /// Returns whether the blocks are all those of the layout that the choice is made within, of which the tensor says what pairs they have.
    pub fn has_all_blocks(&self) -> bool {
        match self {
            Self::Positions(_) | Self::OwnPositions(_) | Self::Keys { .. } => true,
            Self::Mask | Self::Indices { .. } | Self::Scores(_) => false,
        }
    }
}

/// Keys that a query sees, by the positions of both. A negative position is none: its query sees nothing, and nobody its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PositionMask {
    /// Those of earlier positions.
    Before,
    /// Those of earlier positions, and of its own.
    UpTo,
    /// Those of all positions but its own.
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

/// Block rows that a tile of chosen blocks unites at most: its masks are a table over all their subsets.
pub const TALLEST: usize = 8;

impl DeviceChoice {
    /// The positions of a batch entry and head, if a rule chooses by them: how many elements, and which is the first key's, after those of queries or with them.
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

    /// The most blocks that a row of query blocks can have.
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
