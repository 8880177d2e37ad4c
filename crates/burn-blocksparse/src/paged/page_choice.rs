//! How pages are chosen.

use crate::error::OpError;
use crate::selection::PageSummary;

/// How pages are chosen: what [`select_pages`](crate::select_pages) does of a [`Selection`](crate::Selection).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageChoice {
    /// What of each page scores follow from.
    pub summary: PageSummary,
    /// Slots of a page.
    pub page: usize,
    /// Pages that are chosen together, by the sum of their scores.
    pub block: usize,
    /// Such blocks that are kept, the last of a walk among them.
    pub keep: usize,
    /// Whether scores are the mean over the heads that share keys; otherwise their sum.
    pub mean: bool,
}

impl PageChoice {
    /// Keys that a query attends to at the end of a walk of so many.
    pub fn attended(&self, keys: usize) -> usize {
        let block = self.page * self.block;
        let before = keys.saturating_sub(1) / block;
        before.min(self.keep - 1) * block + (keys - before * block)
    }

    /// Pages that are listed for each walk.
    pub fn listed(&self) -> usize {
        self.keep * self.block
    }
}

impl PageChoice {
    /// By scores that are no summary's: of `keep` blocks of so many pages.
    pub(crate) fn of_blocks(page: usize, block: usize, keep: usize) -> Self {
        Self {
            // Nothing is made of it.
            summary: PageSummary::Mean,
            page,
            block,
            keep,
            mean: false,
        }
    }

    pub(super) fn check(&self) -> Result<(), OpError> {
        if !self.page.is_power_of_two() {
            return Err(OpError::argument(
                "choice.page",
                "a power of two",
                self.page,
            ));
        }
        for (argument, number) in [("choice.block", self.block), ("choice.keep", self.keep)] {
            if number == 0 {
                return Err(OpError::argument(argument, "at least 1", number));
            }
        }
        Ok(())
    }
}
