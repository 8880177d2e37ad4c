//! What native sparse attention keeps of earlier tokens.

use crate::SparseMhaCache;

/// What it keeps beside the keys and values of the blocks that are chosen.
#[derive(Clone, Debug)]
pub(crate) struct BranchCaches {
    /// Keys and values that are compressed: all of them, so that any may be taken back.
    pub(crate) tokens: SparseMhaCache,
    /// Those of the window, where they are others.
    pub(crate) window: SparseMhaCache,
    /// One key and value of each block.
    pub(crate) entries: SparseMhaCache,
    block: usize,
    stride: usize,
}

impl BranchCaches {
    pub(crate) fn new(empty: impl Fn() -> SparseMhaCache, block: usize, stride: usize) -> Self {
        Self {
            tokens: empty(),
            window: empty(),
            entries: empty(),
            block,
            stride,
        }
    }

    /// Forgets every token from `len` on, and the blocks that are not whole then.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.window.truncate(len);
        self.entries.truncate(match len.checked_sub(self.block) {
            Some(behind) => behind / self.stride + 1,
            None => 0,
        });
    }
}
