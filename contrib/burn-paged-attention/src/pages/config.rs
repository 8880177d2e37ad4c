//! Configuration of a pool of pages.

use serde::{Deserialize, Serialize};

use super::CacheError;
use blocksparse::Pattern;

/// Page sizes of pools. Tests also use smaller ones ([`PoolConfig::with_small_pages`]).
const PAGE_SIZES: [usize; 4] = [16, 32, 64, 128];

/// Keys of a sequence that are retained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvRetention {
    /// All keys, whatever the pattern. Any number of tokens can be rolled back.
    All,
    /// Keys that some later query attends to, by the pool's pattern. The output is exact; the less the pattern reaches back, the fewer keys are
    /// stored.
    #[default]
    Reachable,
    /// Of the reachable keys, the first `sinks` and those of the last `window` positions, the query's own included, as in [`Pattern::streaming`]
    /// (Xiao et al., 2024). Changes the output if the pattern reaches further.
    Window {
        /// Last positions that a query sees, its own included.
        window: usize,
        /// First positions that are always retained.
        sinks: usize,
    },
    /// All keys until the caller evicts some ([`PagePool::retain`](super::PagePool::retain)), for causal heads without further limits. Changes the
    /// output.
    Evict,
}

impl KvRetention {
    pub(super) fn validate(self) -> Result<(), CacheError> {
        if let Self::Window { window, sinks } = self {
            blocksparse::ensure! {
                CacheError;
                window > 0 => "window", "at least 1", 0;
                window <= MOST_POSITIONS => "window", format!("at most {MOST_POSITIONS}"), window;
                sinks <= MOST_POSITIONS => "sinks", format!("at most {MOST_POSITIONS}"), sinks;
            }
        }
        Ok(())
    }
}

/// Most tokens of a sequence. Positions are 32-bit on devices, and the largest means "always".
pub(super) const MOST_POSITIONS: usize = i32::MAX as usize - 1;

/// Number and size of a pool's pages, and the patterns of the layers that share it.
///
/// Layers with equal patterns retain the same keys and share the block tables, each with its own tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[must_use]
pub struct PoolConfig {
    pub(super) pages: usize,
    pub(super) page_size: usize,
    pub(super) small: bool,
    pub(super) pattern: Pattern,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) table_rows: Option<usize>,
    pub(super) rollback: usize,
    pub(super) reuse: Option<u64>,
    pub(super) hash_mask: u64,
}

impl PoolConfig {
    /// Makes the configuration of a pool of `pages` pages of 32 slots, for one causal head. A slot holds one key and value of one table row: of one
    /// KV head, or of all of them if they retain the same keys.
    pub fn new(pages: usize) -> Self {
        Self {
            pages,
            page_size: 32,
            small: false,
            pattern: Pattern::causal(),
            heads: 1,
            kv_heads: 1,
            table_rows: None,
            rollback: 0,
            reuse: None,
            hash_mask: u64::MAX,
        }
    }

    /// Sets the slots of a page: 16, 32, 64 or 128.
    pub fn with_page_size(mut self, page_size: usize) -> Self {
        self.page_size = page_size;
        self
    }

    /// Allows pages of 1, 2, 4 and 8 slots, which are slow in every kernel.
    #[doc(hidden)]
    pub fn with_small_pages(mut self) -> Self {
        self.small = true;
        self
    }

    /// Sets the pattern of `heads` query heads, of which `heads / kv_heads` share a KV head.
    pub fn with_pattern(mut self, pattern: Pattern, heads: usize, kv_heads: usize) -> Self {
        self.pattern = pattern;
        self.heads = heads;
        self.kv_heads = kv_heads;
        self
    }

    blocksparse::setters! {
        /// Sets the rows of a sequence in the page table: 1, where all KV heads retain the keys that any of them reaches, or one for each KV head.
        /// Default: 1 if the KV heads reach the same keys, otherwise one for each.
        with_table_rows => table_rows: Some(usize),
        /// Sets the number of tokens that can be rolled back, such as rejected draft tokens. Default: 0. Keys that these tokens evict stay stored
        /// that long. Sequences that retain all keys can be rolled back to any length.
        with_rollback => rollback: usize,
        /// Lets full pages be found by their tokens, for sequences that begin with the same tokens:
        /// [`PagePool::join_with_prefix`](super::PagePool::join_with_prefix). The fingerprint stands for the model and whatever else keys depend on.
        with_prefix_reuse => reuse: Some(u64),
    }

    /// Masks the hashes of known pages, so that tests can force collisions.
    #[doc(hidden)]
    pub fn with_hash_mask(mut self, mask: u64) -> Self {
        self.hash_mask = mask;
        self
    }

    pub(super) fn validate(&self) -> Result<(), CacheError> {
        let &Self {
            pages,
            page_size,
            kv_heads,
            heads,
            ..
        } = self;
        let is_small = self.small && [1, 2, 4, 8].contains(&page_size);
        let rows = self.table_rows.unwrap_or(1);
        blocksparse::ensure! {
            CacheError;
            pages > 0 => "pages", "at least 1", 0;
            PAGE_SIZES.contains(&page_size) || is_small => "page_size", "16, 32, 64 or 128", page_size;
            pages <= (1 << 31) / page_size => "pages", format!("at most {} of {page_size} slots", (1usize << 31) / page_size), pages;
            kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads) => "heads", format!("a multiple of the {kv_heads} KV heads"), heads;
            rows == 1 || rows == kv_heads => "table_rows", format!("1 or the {kv_heads} KV heads"), rows;
        }
        self.pattern
            .validate(self.heads)
            .map_err(|error| CacheError::argument("pattern", "valid", error))
    }

    /// Returns the pattern that says which keys a sequence may evict.
    pub fn pattern(&self) -> &Pattern {
        &self.pattern
    }

    /// Returns the slots of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the pages of the pool.
    pub fn pages(&self) -> usize {
        self.pages
    }
}
