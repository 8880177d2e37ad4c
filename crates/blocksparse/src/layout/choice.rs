//! Layouts whose blocks a tensor on a device chooses: the host knows their sizes and how many blocks there can be.

use super::shape::LayoutShape;
use crate::rule::Rule;

/// How the blocks of a layout are chosen on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceChoice {
    /// Batch entries and heads that have blocks of their own: `[batch or 1, a divisor of the heads]`. Neighbouring heads share.
    pub patterns: [usize; 2],
    /// Whether queries see no later keys. The last query sits at the last key.
    pub causal: bool,
    /// The tensor that chooses.
    pub by: ChosenBy,
}

/// What the tensor that chooses blocks says, for each row of query blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ChosenBy {
    /// Of each key block, whether it is chosen.
    Mask,
    /// The key blocks that are chosen; what is no key block counts for nothing.
    Indices {
        /// Indices of a row.
        most: usize,
    },
    /// Of each key block a score in f32, by which a rule chooses.
    Scores(Rule),
}

/// Block rows that a tile of chosen blocks unites at most: its masks are a table over all their subsets.
pub(crate) const TALLEST: usize = 8;

impl DeviceChoice {
    /// The most blocks that a row of query blocks can have.
    pub(crate) fn most_blocks(&self, shape: &LayoutShape) -> usize {
        let all = shape.seq_kv.div_ceil(shape.block_size);
        let most = match self.by {
            ChosenBy::Mask => all,
            ChosenBy::Indices { most } => most,
            ChosenBy::Scores(rule) => rule.most_blocks(all),
        };
        most.min(all)
    }
}
