//! Constructors of layouts: from a pattern, a callback over blocks, other layouts, or a tensor on a device.

use std::sync::Arc;

use super::builder::LayoutBuilder;
use super::choice::DeviceChoice;
use super::grid::{Grid, natural_layout};
use super::mask::{BlockMask, MaskInterner};
use super::rows::{RowRuns, Run};
use super::shape::LayoutShape;
use super::{BlockLayout, residue};
use crate::{LayoutError, Pattern};

impl Pattern {
    /// Builds the layout of this pattern for self-attention over `seq` positions.
    ///
    /// # Errors
    /// See [`BlockLayout::new`].
    pub fn layout(
        &self,
        heads: usize,
        seq: usize,
        block_size: usize,
    ) -> Result<BlockLayout, LayoutError> {
        BlockLayout::new(self, LayoutShape::square(heads, seq, block_size))
    }
}

impl BlockLayout {
    /// Builds the layout of `pattern`. Time and memory are proportional to the kept blocks, never to `seq_q · seq_kv` (unless the pattern is a callback,
    /// [`Pattern::from_fn`]).
    ///
    /// Query row `r` has position `r + seq_kv − seq_q`: causality is aligned bottom-right.
    ///
    /// # Errors
    /// [`LayoutError`] if a size or one of the pattern's parameters is out of range.
    pub fn new(pattern: &Pattern, shape: LayoutShape) -> Result<Self, LayoutError> {
        let layout = natural_layout(pattern, shape)?;
        let parts = residue::parts(pattern, shape)?;
        Ok(layout.with_parts(parts))
    }

    /// Builds a layout from a callback that is called once per head and block: `None` drops the block, `Some(mask)` keeps the pairs of the mask. Pairs beyond
    /// `seq_q` or `seq_kv` on a ragged edge are dropped. [`BlockMask::corner`]`(b, b, b)` keeps all pairs.
    ///
    /// ```
    /// use blocksparse::{BlockLayout, BlockMask, LayoutShape};
    ///
    /// // A checkerboard of 16 × 16 blocks.
    /// let shape = LayoutShape::square(1, 64, 16);
    /// let layout = BlockLayout::from_block_fn("checkerboard", shape, |_head, q_block, kv_block| {
    ///     ((q_block + kv_block) % 2 == 0).then(|| BlockMask::corner(16, 16, 16))
    /// })?;
    /// assert_eq!(layout.blocks(), 8);
    /// # Ok::<(), blocksparse::LayoutError>(())
    /// ```
    ///
    /// # Errors
    /// [`LayoutError`] if a size is out of range or a mask has another block size.
    pub fn from_block_fn(
        name: impl Into<String>,
        shape: LayoutShape,
        mut block: impl FnMut(usize, usize, usize) -> Option<BlockMask>,
    ) -> Result<Self, LayoutError> {
        let kv_blocks = shape.seq_kv.div_ceil(shape.block_size.max(1));
        Self::from_row_fn(name, shape, |head, q_block| {
            (0..kv_blocks)
                .filter_map(|kv_block| Some((kv_block, block(head, q_block, kv_block)?)))
                .collect()
        })
    }

    /// Builds a layout from a callback that is called once per head and block row and lists the kept blocks in ascending order, with their masks. Time is
    /// proportional to the kept blocks. Otherwise like [`from_block_fn`](Self::from_block_fn).
    ///
    /// # Errors
    /// [`LayoutError`] if a size is out of range, a mask has another block size, or the blocks are not ascending or lie beyond the keys.
    pub fn from_row_fn(
        name: impl Into<String>,
        shape: LayoutShape,
        mut row: impl FnMut(usize, usize) -> Vec<(usize, BlockMask)>,
    ) -> Result<Self, LayoutError> {
        shape.validate()?;
        let b = shape.block_size;
        let grid = Grid::new(shape);
        let mut masks = MaskInterner::new(b);
        let mut heads = Vec::with_capacity(shape.heads);
        for head in 0..shape.heads {
            let mut rows = RowRuns::new();
            for q_block in 0..grid.q_blocks() {
                let mut least = 0;
                for (kv_block, mask) in row(head, q_block) {
                    crate::ensure! {
                        LayoutError;
                        (least..grid.kv_blocks()).contains(&kv_block)
                            => "a block of a row returned by the callback", format!("ascending, below {}", grid.kv_blocks()), kv_block;
                    }
                    least = kv_block + 1;
                    crate::ensure! {
                        LayoutError;
                        mask.block_size() == b
                            => "the block size of the mask returned by the callback", format!("{b}, the layout's"), mask.block_size();
                    }
                    let (height, width) = (grid.rows_in(q_block), grid.columns_in(kv_block));
                    let mask = match height == b && width == b {
                        true => mask,
                        false => {
                            BlockMask::from_fn(b, |r, c| r < height && c < width && mask.get(r, c))
                        }
                    };
                    if let Some(mask) = masks.intern(mask) {
                        rows.push(Run::one(kv_block as u32, mask));
                    }
                }
                rows.end_row();
            }
            heads.push(rows);
        }
        Ok(Self::from_heads(name.into(), shape, heads, masks))
    }

    /// Returns the layout with `heads` heads that are all equal to the first head of this layout. Use it to build a pattern that all heads share only once.
    ///
    /// # Errors
    /// [`LayoutError`] if `heads` is 0 or too large, or if the layout is per batch or lists no blocks.
    pub fn of_first_head(&self, heads: usize) -> Result<Self, LayoutError> {
        let shape = LayoutShape {
            heads,
            ..*self.shape()
        };
        shape.validate()?;
        crate::ensure! {
            LayoutError;
            self.batch().is_none() && self.device_choice().is_none()
                => "the layout", "built on the host and shared over the batch", format!("batch {:?}", self.batch());
        }
        let first = self.inner.head_patterns[0] as usize;
        let rows = self.inner.patterns[first].rows.clone();
        let masks = MaskInterner::of(self.masks().to_vec());
        let name = self.name().to_owned();
        Ok(Self::from_heads(name, shape, vec![rows], masks))
    }

    /// Combines one layout per batch entry, all of the same shape, into one layout.
    ///
    /// # Errors
    /// [`LayoutError`] if `layouts` is empty, if shapes differ, or if a layout is itself per batch.
    pub fn stack_batch(layouts: &[BlockLayout]) -> Result<Self, LayoutError> {
        let Some(first) = layouts.first() else {
            return Err(LayoutError::argument("layouts", "at least one", "none"));
        };
        let mut builder = LayoutBuilder::new(MaskInterner::new(first.block_size()));
        for layout in layouts {
            crate::ensure! {
                LayoutError;
                layout.shape() == first.shape() && layout.batch().is_none()
                    => "layouts",
                    format!("shared over the batch and of shape {:?}", first.shape()),
                    format!("{:?}, batch {:?}", layout.shape(), layout.batch());
            }
            let ids: Vec<u32> = (layout.masks().iter())
                .map(|mask| builder.masks.intern(mask.clone()))
                .map(|id| id.expect("kept masks are not empty"))
                .collect();
            let known: Vec<u32> = (layout.inner.patterns.iter())
                .map(|pattern| {
                    let mut rows = pattern.rows.clone();
                    let runs = rows.runs.iter_mut();
                    runs.for_each(|run| run.mask = ids[run.mask as usize]);
                    builder.pattern(rows)
                })
                .collect();
            let heads = layout.inner.head_patterns.iter();
            (builder.head_patterns).extend(heads.map(|&pattern| known[pattern as usize]));
        }
        let name = first.name().to_owned();
        let stacked = builder.finish(name, *first.shape(), Some(layouts.len()));
        Ok(stacked.with_parts(residue::stacked(layouts)?))
    }

    /// Builds a layout whose blocks a tensor on a device chooses. It has sizes and **lists no blocks**. Kernels compute their launch plans from the tensor on
    /// its device, once `kernels::choose_blocks` has received it.
    ///
    /// # Errors
    /// [`LayoutError`] if a size is out of range, or if the number of patterns does not divide the heads into equal groups of adjacent heads.
    pub fn on_device(
        name: impl Into<String>,
        shape: LayoutShape,
        choice: DeviceChoice,
    ) -> Result<Self, LayoutError> {
        shape.validate()?;
        let [batch, heads] = choice.patterns;
        crate::ensure! {
            LayoutError;
            heads != 0 && shape.heads.is_multiple_of(heads) => "patterns' heads", format!("a divisor of the {} heads", shape.heads), heads;
            batch != 0 => "patterns' batch", "at least 1", batch;
        }
        let batch = (batch > 1).then_some(batch);
        Ok(Self::chosen(name.into(), shape, batch, choice, None))
    }

    /// Builds a layout on a device from sizes that are already checked.
    pub(super) fn chosen(
        name: String,
        shape: LayoutShape,
        batch: Option<usize>,
        choice: DeviceChoice,
        within: Option<&Self>,
    ) -> Self {
        let mut builder = LayoutBuilder::new(MaskInterner::new(shape.block_size));
        let rows = RowRuns::empty(shape.seq_q.div_ceil(shape.block_size));
        let nothing = builder.pattern(rows);
        builder.head_patterns = vec![nothing; batch.unwrap_or(1) * shape.heads];
        let mut layout = builder.finish(name, shape, batch);
        let inner = Arc::get_mut(&mut layout.inner).expect("just made");
        (inner.choice, inner.within) = (Some(choice), within.cloned());
        layout
    }
}
