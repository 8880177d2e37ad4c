//! Packs the query heads of a key head one after another along the sequence.

use std::collections::HashMap;

use super::BlockLayout;
use super::builder::LayoutBuilder;
use super::mask::{BlockMask, MaskInterner};
use super::rows::{RowRuns, Run};
use super::shape::LayoutShape;
use crate::known::Slots;

/// Packed layouts by their number of KV heads.
#[derive(Default)]
struct Packed(Slots<usize, Option<Option<BlockLayout>>>);

impl BlockLayout {
    /// Returns an equivalent layout with `kv_heads` heads: query `i` of the `h`-th head that shares a key head becomes query `h · seq_q + i`. In memory both
    /// query tensors are the same, `[batch, kv_heads, heads / kv_heads · seq_q, head_dim]`. With few queries, as in decoding, this fills the tiles of kernels,
    /// and keys and values are read once for all heads that share them.
    ///
    /// Returns `None` if there is more than one row of query blocks, if heads that share a key head have different patterns, if `kv_heads` does
    /// not divide the heads, or if a device chooses the blocks. The result is computed once per layout, in O(runs).
    ///
    /// ```
    /// use blocksparse::Pattern;
    ///
    /// // Two more queries after 100 positions.
    /// let shape = blocksparse::LayoutShape::new(8, [2, 102], 32);
    /// let layout = blocksparse::BlockLayout::new(&Pattern::causal(), shape)?;
    /// let packed = layout.pack_heads(2).unwrap();
    /// assert_eq!((packed.heads(), packed.seq_q()), (2, 8));
    /// assert_eq!(packed.to_dense(0)[7], layout.to_dense(3)[1]);
    /// # Ok::<(), blocksparse::LayoutError>(())
    /// ```
    pub fn pack_heads(&self, kv_heads: usize) -> Option<BlockLayout> {
        let known = self.attachment(Packed::default);
        known.0.get_or_make(kv_heads, || self.pack(kv_heads))
    }

    fn pack(&self, kv_heads: usize) -> Option<BlockLayout> {
        let chosen = self.device_choice().is_some();
        if chosen || kv_heads == 0 || !self.heads().is_multiple_of(kv_heads) || self.q_blocks() != 1
        {
            return None;
        }
        let group = self.heads() / kv_heads;
        let shape = LayoutShape {
            heads: kv_heads,
            seq_q: group * self.seq_q(),
            ..*self.shape()
        };
        let mut builder = LayoutBuilder::new(MaskInterner::new(self.block_size()));
        for batch in 0..self.batch().unwrap_or(1) {
            for kv_head in 0..kv_heads {
                let first = self.pattern_of(batch, kv_head * group);
                let alike =
                    (0..group).all(|head| self.pattern_of(batch, kv_head * group + head) == first);
                if !alike {
                    return None;
                }
                let rows = self.packed_rows(first, shape.seq_q, &mut builder.masks);
                builder.push(rows);
            }
        }
        let name = format!("{}, {group} heads in a sequence", self.name());
        Some(builder.finish(name, shape, self.batch()))
    }

    /// Builds block rows that all have the blocks of the pattern's only block row, with new masks.
    fn packed_rows(&self, pattern: usize, seq_q: usize, masks: &mut MaskInterner) -> RowRuns {
        let b = self.block_size();
        let mut rows = RowRuns::new();
        for first in (0..seq_q).step_by(b) {
            let mut known: HashMap<u32, Option<u32>> = HashMap::new();
            for run in self.row_runs(pattern, 0) {
                let mask = *known.entry(run.mask).or_insert_with(|| {
                    let mask = &self.masks()[run.mask as usize];
                    masks.intern(BlockMask::from_fn(b, |row, column| {
                        first + row < seq_q && mask.get((first + row) % self.seq_q(), column)
                    }))
                });
                if let Some(mask) = mask {
                    rows.push(Run { mask, ..*run });
                }
            }
            rows.end_row();
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::Pattern;

    #[rstest]
    fn rows_are_those_of_the_heads(
        #[values(
            Pattern::causal(),
            Pattern::fixed(16, 4),
            Pattern::streaming(40, 3),
            Pattern::dense()
        )]
        pattern: Pattern,
        #[values(8, 32, 64)] block_size: usize,
        #[values(1, 3, 8)] seq_q: usize,
        #[values(1, 2, 6)] kv_heads: usize,
    ) {
        let shape = LayoutShape::new(6, [seq_q, 150], block_size);
        let layout = BlockLayout::new(&pattern, shape).unwrap();
        let packed = layout.pack_heads(kv_heads).unwrap();
        let group = 6 / kv_heads;
        assert_eq!((packed.heads(), packed.seq_q()), (kv_heads, group * seq_q));
        for kv_head in 0..kv_heads {
            for (row, allowed) in packed.to_dense(kv_head).into_iter().enumerate() {
                let head = kv_head * group + row / seq_q;
                assert_eq!(allowed, layout.to_dense(head)[row % seq_q], "row {row}");
            }
        }
    }

    #[test]
    fn batch_entries_keep_their_layouts() {
        let shape = LayoutShape::new(4, [2, 40], 8);
        let one = BlockLayout::new(&Pattern::causal(), shape).unwrap();
        let other = BlockLayout::new(&Pattern::local(5), shape).unwrap();
        let packed = BlockLayout::stack_batch(&[one, other.clone()]).unwrap();
        let packed = packed.pack_heads(2).unwrap();
        assert_eq!(packed.batch(), Some(2));
        assert_eq!(packed.to_dense_batch(1, 1)[3], other.to_dense(3)[1]);
    }

    #[test]
    fn what_does_not_fit_is_left_alone() {
        let shape = |seq_q| LayoutShape::new(4, [seq_q, 40], 8);
        let layout = BlockLayout::new(&Pattern::causal(), shape(9)).unwrap();
        assert!(layout.pack_heads(2).is_none(), "two rows of blocks");
        let layout = BlockLayout::new(&Pattern::causal(), shape(8)).unwrap();
        assert!(layout.pack_heads(3).is_none() && layout.pack_heads(0).is_none());
        let heads = Pattern::per_head([Pattern::causal(), Pattern::local(4)]);
        let layout = BlockLayout::new(&heads, shape(1)).unwrap();
        assert!(layout.pack_heads(2).is_none(), "unlike heads");
    }
}
