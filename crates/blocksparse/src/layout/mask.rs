//! Element masks of partially filled blocks, each stored once.

use std::collections::HashMap;

/// Mask id of a block whose `b × b` pairs are all computed. It is entry 0 of every mask table.
pub const FULL: u32 = 0;

/// The allowed pairs of one block: `b × b` bits, row (query) major, 1 = computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlockMask {
    block_size: usize,
    words: Box<[u64]>,
}

impl BlockMask {
    /// Builds the mask with the bits `allowed(row, column)`, both in `0..block_size`. A layout only accepts masks of its own block size.
    pub fn from_fn(block_size: usize, mut allowed: impl FnMut(usize, usize) -> bool) -> Self {
        let mut words = vec![0u64; (block_size * block_size).div_ceil(64)].into_boxed_slice();
        for row in 0..block_size {
            for column in 0..block_size {
                if allowed(row, column) {
                    let bit = row * block_size + column;
                    words[bit / 64] |= 1 << (bit % 64);
                }
            }
        }
        Self { block_size, words }
    }

    /// Builds the mask of the first `rows` rows and `columns` columns, for a block on a ragged edge.
    pub fn corner(block_size: usize, rows: usize, columns: usize) -> Self {
        Self::from_fn(block_size, |row, column| row < rows && column < columns)
    }

    /// Returns the mask of all pairs.
    pub(crate) fn full(block_size: usize) -> Self {
        let words = vec![u64::MAX; block_size * block_size / 64].into_boxed_slice();
        Self { block_size, words }
    }

    /// Builds the mask whose entry in row `r` and column `c` is bit `c` of `columns(r)`.
    pub(crate) fn from_rows(block_size: usize, columns: impl Fn(usize) -> u128) -> Self {
        let mut words = vec![0u64; block_size * block_size / 64].into_boxed_slice();
        for row in 0..block_size {
            let bits = columns(row);
            let first = row * block_size;
            words[first / 64] |= (bits as u64) << (first % 64);
            if block_size > 64 {
                words[first / 64 + 1] |= (bits >> 64) as u64;
            }
        }
        Self { block_size, words }
    }

    /// Combines two masks word by word: their intersection or their union.
    pub(crate) fn combine(mut self, other: &Self, op: fn(u64, u64) -> u64) -> Self {
        for (word, &other) in self.words.iter_mut().zip(&other.words) {
            *word = op(*word, other);
        }
        self
    }

    pub(crate) fn from_words(block_size: usize, words: &[u64]) -> Self {
        Self {
            block_size,
            words: words.into(),
        }
    }

    /// Returns the number of rows, which equals the number of columns.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns whether the pair (`row`, `column`) of the block is computed.
    ///
    /// # Panics
    /// If the pair is outside the block.
    pub fn get(&self, row: usize, column: usize) -> bool {
        assert!(
            row < self.block_size && column < self.block_size,
            "pair ({row}, {column}) of a block of {}",
            self.block_size
        );
        let bit = row * self.block_size + column;
        self.words[bit / 64] >> (bit % 64) & 1 == 1
    }

    /// Returns the number of computed pairs.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Returns whether no pair is computed.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&w| w == 0)
    }

    /// Returns whether every pair is computed.
    pub fn is_full(&self) -> bool {
        self.count() == (self.block_size * self.block_size) as u64
    }

    /// Returns the bits, 64 to a word, row-major: `block_size² / 64` words.
    pub fn words(&self) -> &[u64] {
        &self.words
    }
}

/// Assigns one id to every distinct mask. The full mask has id [`FULL`].
#[derive(Debug)]
pub(crate) struct MaskInterner {
    masks: Vec<BlockMask>,
    ids: HashMap<BlockMask, u32>,
}

impl MaskInterner {
    pub fn new(block_size: usize) -> Self {
        Self::of(vec![BlockMask::full(block_size)])
    }

    /// Starts from a layout's masks, which keep their ids.
    pub fn of(masks: Vec<BlockMask>) -> Self {
        Self {
            ids: masks.iter().cloned().zip(FULL..).collect(),
            masks,
        }
    }

    /// Returns the id of `mask`, or `None` if it is empty.
    pub fn intern(&mut self, mask: BlockMask) -> Option<u32> {
        if mask.is_empty() {
            return None;
        }
        if let Some(&id) = self.ids.get(&mask) {
            return Some(id);
        }
        let id = self.masks.len() as u32;
        self.masks.push(mask.clone());
        self.ids.insert(mask, id);
        Some(id)
    }

    pub fn into_masks(self) -> Vec<BlockMask> {
        self.masks
    }
}
