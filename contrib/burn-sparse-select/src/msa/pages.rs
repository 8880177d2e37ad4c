//! The choice over pages of keys, by which pools decode.

use burn::tensor::{Int, Tensor};

use crate::msa::{Msa, MsaIndex};
use crate::pages::{PageChoice, topk_pages};
use crate::selection::parts::padded;
use burn_blocksparse::OpError;

impl Msa {
    /// Returns the same choice over pages of `page` tokens: [`keep`](Self::keep) blocks.
    ///
    /// # Errors
    /// [`OpError`] if pages are no whole parts of blocks, or no power of two.
    pub fn on_pages(&self, page: usize) -> Result<PageChoice, OpError> {
        if !page.is_power_of_two() || !self.block.is_multiple_of(page) {
            let expected = format!(
                "a power of two that divides {}, the block of msa",
                self.block
            );
            return Err(OpError::argument("page_size", expected, page));
        }
        Ok(PageChoice::of_blocks(page, self.block / page, self.keep))
    }

    /// The pages of the blocks that queries at any positions choose, and of their own: [`choose`](Self::choose) for keys that lie in pages.
    ///
    /// # Shapes
    /// - `index`: `rows` queries of each batch entry, and the keys of all its pages in order. What stands after a query's position has no part in the result
    /// - `spans`: i32 `[batch · rows, 1, 4]`, as [`topk_pages`] has them: a page list of each query, which ends at its own key
    /// - result: i32 `[batch · rows, kv_heads, choice.selected_pages()]`
    ///
    /// # Errors
    /// As [`topk_pages`].
    pub fn choose_pages(
        &self,
        index: &MsaIndex,
        spans: &Tensor<3, Int>,
        choice: &PageChoice,
    ) -> Result<Tensor<3, Int>, OpError> {
        let scores = self.block_scores(index)?;
        let [batch, groups, rows, blocks] = scores.dims();
        // The score of a block is the sum of its pages'.
        let scores = (scores.swap_dims(1, 2)).reshape([batch * rows, groups, blocks, 1]);
        let scores = padded(scores, 3, [0, choice.block - 1]);
        let scores = scores.reshape([batch * rows, groups, blocks * choice.block]);
        topk_pages(scores, spans, choice)
    }
}
