//! Layouts whose blocks a tensor on a device chooses: the host knows their sizes and how many blocks there can be.

use crate::builder::Rows;
use crate::layout::Inner;
use crate::mask::MaskInterner;
use crate::plan::{START, Tiling};
use crate::{BlockLayout, LayoutError, LayoutShape};

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

    /// As [`tiling_overhead`](crate::plan::tiling_overhead), of which only sizes are known: rows are taken to share nothing.
    pub(crate) fn overhead(&self, shape: &LayoutShape, tiling: Tiling) -> f64 {
        let b = shape.block_size;
        let height = (tiling.rows / b).max(1);
        if height > TALLEST || tiling.clustered {
            return f64::INFINITY;
        }
        let kept = match self.by {
            // A guess.
            ChosenBy::Mask => self.most_blocks(shape).div_ceil(4),
            _ => self.most_blocks(shape).max(1),
        };
        let width = (height * kept * b).next_multiple_of(tiling.cols.max(b));
        (width as f64 + START) / (kept * b) as f64
    }
}

impl BlockLayout {
    /// A layout whose blocks a tensor on a device chooses. It has sizes and **lists no blocks**; kernels make their launch plans of the
    /// tensor, on its device, once `kernels::choose_blocks` has been given it.
    ///
    /// # Errors
    /// [`LayoutError`] if a size is out of range, or there are patterns for some of the heads only.
    pub fn on_device(
        name: impl Into<String>,
        shape: LayoutShape,
        choice: DeviceChoice,
    ) -> Result<Self, LayoutError> {
        shape.validate()?;
        let [batch, heads] = choice.patterns;
        if heads != 1 && heads != shape.heads {
            let expected = format!("{} or 1", shape.heads);
            return Err(LayoutError::argument("patterns' heads", expected, heads));
        }
        if batch == 0 {
            return Err(LayoutError::argument(
                "patterns' batch",
                "at least 1",
                batch,
            ));
        }
        let rows = Rows::empty(shape.seq_q.div_ceil(shape.block_size));
        let masks = MaskInterner::new(shape.block_size).into_masks();
        let batch = (batch > 1).then_some(batch);
        let head_patterns = vec![0; batch.unwrap_or(1) * shape.heads];
        let inner = Inner::new(name.into(), shape, batch, head_patterns, vec![rows], masks);
        Ok(Self::from_parts(inner.on_device(choice)))
    }

    /// How the layout's blocks are chosen, if a tensor on a device chooses them.
    pub fn device_choice(&self) -> Option<&DeviceChoice> {
        self.inner().choice.as_ref()
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
        let shape = LayoutShape {
            heads: 1,
            seq_q: 8,
            seq_kv: 40,
            block_size: 8,
        };
        let choice = DeviceChoice {
            patterns: [1, 1],
            causal: true,
            by: ChosenBy::TopK { k, local, first },
        };
        assert_eq!(choice.most_blocks(&shape), most);
    }
}
