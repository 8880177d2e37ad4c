//! Layouts whose blocks a tensor on a device chooses: the host knows their sizes and how many blocks there can be.

use super::shape::LayoutShape;

/// How the blocks of a layout are chosen on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceChoice {
    /// Batch entries and heads that have blocks of their own: `[batch or 1, heads or 1]`.
    pub patterns: [usize; 2],
    /// Whether queries see no later keys. The last query sits at the last key.
    pub causal: bool,
    /// The tensor that chooses.
    pub by: ChosenBy,
}

/// What the tensor that chooses blocks says, for each row of query blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChosenBy {
    /// Of each key block, whether it is chosen.
    Mask,
    /// The key blocks that are chosen; what is no key block counts for nothing.
    Indices {
        /// Indices of a row.
        most: usize,
    },
    /// Of each key block a score in f32; the highest are chosen, of equal ones the earlier. NaN is the lowest.
    TopK {
        /// Blocks of a row, the forced ones among them (more, if more are forced).
        k: usize,
        /// How many key blocks up to the queries' own are forced: 1 is the diagonal.
        local: usize,
        /// How many of the first key blocks are forced.
        first: usize,
    },
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
            ChosenBy::TopK { k, local, first } => {
                // Positions of a block of queries are of two blocks of keys, or of one.
                let near = local.saturating_add(usize::from(local > 0));
                k.max(first.saturating_add(near))
            }
        };
        most.min(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case(3, 1, 0, 3)]
    #[case(1, 1, 2, 4)]
    #[case(1, 2, 1, 4)]
    #[case(1, 0, 2, 2)]
    #[case(1, 1, usize::MAX, 5)]
    #[case(1, usize::MAX, 0, 5)]
    #[case(usize::MAX, 0, 0, 5)]
    fn no_row_has_more_blocks_than_there_are(
        #[case] k: usize,
        #[case] local: usize,
        #[case] first: usize,
        #[case] most: usize,
    ) {
        let shape = LayoutShape::new(1, [8, 40], 8);
        let choice = DeviceChoice {
            patterns: [1, 1],
            causal: true,
            by: ChosenBy::TopK { k, local, first },
        };
        assert_eq!(choice.most_blocks(&shape), most);
    }
}
