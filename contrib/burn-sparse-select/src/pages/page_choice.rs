//! How pages are chosen.

use std::ops::Range;

use blocksparse::Always;

use crate::selection::PageSummary;
use burn_blocksparse::OpError;

/// How pages are chosen: what [`select_pages`](crate::pages::choice::select_pages) does of a [`Selection`](crate::selection::Selection).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageChoice {
    /// What of each page scores follow from.
    pub summary: PageSummary,
    /// Slots of a page.
    pub page: usize,
    /// Pages that are chosen as one, by the sum of their scores.
    pub block: usize,
    /// Such blocks that are retained, the forced ones among them (more, if more are forced).
    pub keep: usize,
    /// Such blocks that are always selected: the first of a walk, and up to its last, which is always one of them.
    pub forced: Always,
    /// Whether scores are the mean over the heads that share keys; otherwise their sum.
    pub mean: bool,
}

impl PageChoice {
    /// Keys that a query attends to that sees so many.
    pub fn attended(&self, keys: usize) -> usize {
        let block = self.page * self.block;
        let before = keys.saturating_sub(1) / block;
        before.min(self.kept().saturating_sub(1)) * block + (keys - before * block)
    }

    /// Pages that a query selects.
    pub fn selected_pages(&self) -> usize {
        self.kept().saturating_mul(self.block)
    }

    /// Blocks that are kept of a walk that has more.
    fn kept(&self) -> usize {
        self.keep.max(self.forced_blocks())
    }

    fn forced_blocks(&self) -> usize {
        let Always { first, local } = self.forced;
        first.saturating_add(local)
    }

    /// Blocks that are chosen by score, at most.
    pub(crate) fn chosen(&self) -> usize {
        self.keep.saturating_sub(self.forced_blocks())
    }

    /// Of a walk of blocks up to `last` those that are chosen from: those before and behind are forced.
    pub(crate) fn between(&self, last: usize) -> Range<usize> {
        let Always { first, local } = self.forced;
        let end = (last + 1).saturating_sub(local);
        first.min(end)..end
    }
}

/// The block in which a walk ends alone.
pub(crate) const OWN: Always = Always { first: 0, local: 1 };

impl PageChoice {
    /// By scores that are no summary's: of `keep` blocks of so many pages.
    pub(crate) fn of_blocks(page: usize, block: usize, keep: usize) -> Self {
        Self {
            // Nothing is made of it.
            summary: PageSummary::Mean,
            page,
            block,
            keep,
            forced: OWN,
            mean: false,
        }
    }

    pub(crate) fn check(&self) -> Result<(), OpError> {
        if !self.page.is_power_of_two() {
            return Err(OpError::argument(
                "choice.page",
                "a power of two",
                self.page,
            ));
        }
        for (argument, number) in [
            ("choice.block", self.block),
            ("choice.keep", self.keep),
            ("choice.forced.local", self.forced.local),
        ] {
            if number == 0 {
                return Err(OpError::argument(argument, "at least 1", number));
            }
        }
        match i32::try_from(self.selected_pages()) {
            Ok(_) => Ok(()),
            Err(_) => {
                let expected = format!("at most {}", i32::MAX);
                Err(OpError::argument(
                    "choice.listed()",
                    expected,
                    self.selected_pages(),
                ))
            }
        }
    }
}
