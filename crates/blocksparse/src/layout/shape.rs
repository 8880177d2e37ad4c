//! The sizes of a layout.

use serde::{Deserialize, Serialize};

use crate::{BLOCK_SIZES, LayoutError};

/// Sizes of a layout. Lengths count tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[must_use]
pub struct LayoutShape {
    /// Number of query heads.
    pub heads: usize,
    /// Number of queries.
    pub seq_q: usize,
    /// Number of keys.
    pub seq_kv: usize,
    /// Width of a block: 8, 16, 32, 64 or 128.
    pub block_size: usize,
}

impl LayoutShape {
    /// Creates a shape; `lengths` are the numbers of queries and keys.
    /// ```
    /// use blocksparse::LayoutShape;
    ///
    /// // One more query after 100 positions.
    /// let shape = LayoutShape::new(8, [1, 101], 64);
    /// assert_eq!((shape.seq_q, shape.seq_kv), (1, 101));
    /// ```
    pub fn new(heads: usize, lengths: [usize; 2], block_size: usize) -> Self {
        let [seq_q, seq_kv] = lengths;
        Self {
            heads,
            seq_q,
            seq_kv,
            block_size,
        }
    }

    /// Creates the shape of self-attention over `seq` positions.
    pub fn square(heads: usize, seq: usize, block_size: usize) -> Self {
        Self::new(heads, [seq, seq], block_size)
    }

    /// Checks the sizes. Every constructor of a layout does so.
    ///
    /// # Errors
    /// [`LayoutError`] if a size is out of range.
    pub fn validate(&self) -> Result<(), LayoutError> {
        crate::ensure! { LayoutError; BLOCK_SIZES.contains(&self.block_size) => "block_size", "8, 16, 32, 64 or 128", self.block_size; }
        for (argument, value, max) in [
            ("heads", self.heads, MAX_HEADS),
            ("seq_q", self.seq_q, MAX_SEQ),
            ("seq_kv", self.seq_kv, MAX_SEQ),
        ] {
            crate::ensure! { LayoutError; value != 0 && value <= max => argument, format!("between 1 and {max}"), value; }
        }
        Ok(())
    }
}

/// Bounds that let positions and block indices fit in 32-bit signed integers, as kernels need.
const MAX_SEQ: usize = 1 << 30;
const MAX_HEADS: usize = 1 << 16;
