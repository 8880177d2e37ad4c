//! Caches of native sparse attention.

use crate::SparseMhaCache;

/// Caches in addition to the keys and values of the selected branch.
#[derive(Clone, Debug)]
pub(crate) struct BranchCaches {
    /// Keys and values to compress. All are kept, so that the cache can be truncated anywhere.
    pub(crate) tokens: SparseMhaCache,
    /// Keys and values of the window, if they differ from the selected branch's.
    pub(crate) window: SparseMhaCache,
    /// One compressed key and value for each block.
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

    /// Drops every token from `len` on, and the blocks that become incomplete.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.window.truncate(len);
        self.entries.truncate(match len.checked_sub(self.block) {
            Some(behind) => behind / self.stride + 1,
            None => 0,
        });
    }
}
