//! Parameters of page selection.

use std::ops::Range;

use blocksparse::Always;
use burn_blocksparse::OpError;

use crate::selection::by_query::top_k;
use crate::selection::{GqaReduction, PageSummary, Selection};

/// Parameters of page selection: a [`Selection`] over a paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageChoice {
    /// Summary of a page from which scores are computed.
    pub summary: PageSummary,
    /// Number of slots of a page.
    pub page: usize,
    /// Number of pages that are selected together, by the sum of their scores.
    pub block: usize,
    /// Number of such blocks that are kept, including forced ones (more if more are forced).
    pub keep: usize,
    /// Forced blocks: the first ones of a page list, and the last ones up to its end. The last block is always forced.
    pub forced: Always,
    /// True if scores are the mean over the heads of a KV head; otherwise their sum.
    pub mean: bool,
}

impl PageChoice {
    /// Returns the number of keys that a query attends to if it sees `keys` keys.
    pub fn attended(&self, keys: usize) -> usize {
        let block = self.page * self.block;
        let before = keys.saturating_sub(1) / block;
        before.min(self.kept().saturating_sub(1)) * block + (keys - before * block)
    }

    /// Returns the number of pages that a query selects.
    pub fn selected_pages(&self) -> usize {
        self.kept().saturating_mul(self.block)
    }

    /// Returns the factor of sums over the `group` query heads of a KV head.
    pub fn factor(&self, group: usize) -> f64 {
        match self.mean {
            true => 1.0 / group as f64,
            false => 1.0,
        }
    }

    /// Returns the number of blocks that are kept of a longer page list.
    pub(crate) fn kept(&self) -> usize {
        self.keep.max(self.forced_blocks())
    }

    fn forced_blocks(&self) -> usize {
        let Always { first, local } = self.forced;
        first.saturating_add(local)
    }

    /// Returns the maximum number of blocks that are selected by score.
    pub(crate) fn chosen(&self) -> usize {
        self.keep.saturating_sub(self.forced_blocks())
    }

    /// Returns the candidate blocks of a page list whose last block is `last`. The blocks before and after are forced.
    pub(crate) fn between(&self, last: usize) -> Range<usize> {
        let Always { first, local } = self.forced;
        let end = (last + 1).saturating_sub(local);
        first.min(end)..end
    }
}

/// Only the block in which a page list ends.
pub(crate) const OWN: Always = Always { first: 0, local: 1 };

impl PageChoice {
    /// Creates a selection of `keep` blocks of `block` pages, by scores that do not come from a page summary.
    pub(crate) fn of_blocks(page: usize, block: usize, keep: usize) -> Self {
        Self {
            // Unused.
            summary: PageSummary::Mean,
            page,
            block,
            keep,
            forced: OWN,
            mean: false,
        }
    }

    /// Checks the parameters.
    ///
    /// # Errors
    /// [`OpError`] if one is out of range.
    pub fn check(&self) -> Result<(), OpError> {
        blocksparse::ensure! { OpError; self.page.is_power_of_two() => "choice.page", "a power of two", self.page; }
        for (argument, number) in [
            ("choice.block", self.block),
            ("choice.keep", self.keep),
            ("choice.forced.local", self.forced.local),
        ] {
            OpError::ensure_positive(argument, number)?;
        }
        let pages = self.selected_pages();
        blocksparse::ensure! { OpError; i32::try_from(pages).is_ok() => "choice.selected_pages()", format!("at most {}", i32::MAX), pages; }
        Ok(())
    }
}

impl Selection {
    /// Returns the selection over pages of `page` slots, whose keys `group` query heads share.
    ///
    /// # Errors
    /// [`OpError`] if the method has no page scores, if pages do not divide its blocks, or if the heads of a KV head select separately: a page is read for all
    /// of them.
    pub fn on_pages(&self, page: usize, group: usize) -> Result<PageChoice, OpError> {
        self.check()?;
        let summary = self.estimator().page_summary().ok_or_else(|| {
            let expected = "one that a pool of pages can choose by (moba, quest)";
            OpError::argument("selection", expected, self)
        })?;
        let rule = self.rule();
        let keep = top_k(rule.keep, "a number of blocks over a pool of pages")?;
        blocksparse::ensure! { OpError; rule.forced.local != 0 => "forced.local", "at least 1, the query's own block, over a pool of pages", 0; }
        let block = self.estimator().grid().block;
        // A bound of several pages is not the sum of their bounds.
        let (fits, expected) = match summary {
            PageSummary::Bounds => (page == block, format!("{block}, the page of {self}")),
            PageSummary::Mean => (
                page > 0 && block.is_multiple_of(page),
                format!("a divisor of {block}, the block of {self}"),
            ),
        };
        blocksparse::ensure! { OpError; fits => "page_size", expected, page; }
        let mean = match self.gqa_reduction() {
            GqaReduction::Mean => true,
            GqaReduction::Sum => false,
            _ if group == 1 => false,
            other => {
                let expected = "mean or sum over a pool of pages, where heads that share keys read the same pages: add share=mean to the text of the selection";
                return Err(OpError::argument("share", expected, other));
            }
        };
        Ok(PageChoice {
            summary,
            page,
            block: block / page,
            keep,
            forced: rule.forced,
            mean,
        })
    }
}
