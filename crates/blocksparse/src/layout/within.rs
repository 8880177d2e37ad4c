//! Restricts a layout to some of its blocks, chosen on the host or by a tensor on a device.

use super::builder::LayoutBuilder;
use super::mask::{BlockMask, MaskInterner};
use super::rows::{RowRuns, Run};
use super::{BlockLayout, DeviceChoice};
use crate::LayoutError;

impl BlockLayout {
    /// Builds a layout whose blocks a tensor on a device chooses from those of `within`. Each block keeps its pairs: see [`Self::on_device`]. The choice is not
    /// causal; `within` alone decides causality.
    ///
    /// # Errors
    /// As [`Self::on_device`]; also if `within` is itself chosen on a device, if the choice is causal, or if heads or batch entries that differ in `within`
    /// share a pattern of the choice.
    pub fn on_device_within(
        name: impl Into<String>,
        choice: DeviceChoice,
        within: &BlockLayout,
    ) -> Result<Self, LayoutError> {
        crate::ensure! {
            LayoutError;
            within.device_choice().is_none() => "within", "built on the host", within.name();
            !choice.causal => "choice", "not causal within another layout", "causal";
        }
        let expected = within.patterns_within(choice.patterns)?;
        crate::ensure! {
            LayoutError;
            choice.patterns == expected => "choice.patterns", format!("{expected:?} within {}", within.name()), format!("{:?}", choice.patterns);
        }
        let batch = within.batch().or((expected[0] > 1).then_some(expected[0]));
        let (name, shape) = (name.into(), *within.shape());
        Ok(Self::chosen(name, shape, batch, choice, Some(within)))
    }

    /// Returns the layout from which a device chooses this layout's blocks, if there is one.
    pub fn within(&self) -> Option<&BlockLayout> {
        self.inner().within.as_ref()
    }

    /// Returns the layout whose blocks this one has all of, if a device determines only the visible pairs.
    #[doc(hidden)]
    pub fn places(&self) -> Option<&BlockLayout> {
        let choice = self.device_choice()?;
        self.within().filter(|_| choice.by.has_all_blocks())
    }

    /// Returns the number of batch entries and heads that need their own blocks, if a choice with `[batch, heads]` patterns is made within this layout.
    ///
    /// # Errors
    /// [`LayoutError`] if the batch sizes differ.
    pub fn patterns_within(&self, [batch, heads]: [usize; 2]) -> Result<[usize; 2], LayoutError> {
        let own = self.batch().unwrap_or(1);
        crate::ensure! { LayoutError; self.batch().is_none() || batch <= 1 || own == batch => "patterns' batch", format!("{own}, the layout's"), batch; }
        let shared = heads > 0
            && self.heads().is_multiple_of(heads)
            && (0..own).all(|entry| {
                let of = |head| self.pattern_of(entry, head);
                let group = self.heads() / heads;
                (0..self.heads()).all(|head| of(head) == of(head / group * group))
            });
        Ok([own.max(batch), if shared { heads } else { self.heads() }])
    }

    /// Keeps the blocks for which `kept(batch, head, q_block, kv_block)` is true, with their pairs. If `batch` is given, the result has that many entries.
    ///
    /// # Errors
    /// [`LayoutError`] if the layout has another batch size.
    pub fn keep_blocks(
        &self,
        name: impl Into<String>,
        batch: Option<usize>,
        mut kept: impl FnMut(usize, usize, usize, usize) -> bool,
    ) -> Result<Self, LayoutError> {
        self.keep(name.into(), batch, |entry, head, q_block, run, _| {
            kept(entry, head, q_block, run.start as usize).then_some(run.mask)
        })
    }

    /// Keeps the pairs for which `kept(batch, head, query, key)` is true. `kept` is called for every pair. If `batch` is given, the result has that many
    /// entries.
    ///
    /// # Errors
    /// [`LayoutError`] if the layout has another batch size.
    pub fn keep_pairs(
        &self,
        name: impl Into<String>,
        batch: Option<usize>,
        mut kept: impl FnMut(usize, usize, usize, usize) -> bool,
    ) -> Result<Self, LayoutError> {
        let b = self.block_size();
        self.keep(name.into(), batch, |entry, head, q_block, run, masks| {
            let whole = &self.masks()[run.mask as usize];
            let (rows, cols) = (q_block * b, run.start as usize * b);
            // Only the full mask covers positions beyond a ragged end.
            masks.intern(BlockMask::from_fn(b, |r, c| {
                rows + r < self.seq_q()
                    && cols + c < self.seq_kv()
                    && whole.get(r, c)
                    && kept(entry, head, rows + r, cols + c)
            }))
        })
    }

    /// Keeps the blocks for which `mask(batch, head, q_block, block, masks)` returns a mask id.
    fn keep(
        &self,
        name: String,
        batch: Option<usize>,
        mut mask: impl FnMut(usize, usize, usize, &Run, &mut MaskInterner) -> Option<u32>,
    ) -> Result<Self, LayoutError> {
        let own = self.batch().or(batch);
        crate::ensure! { LayoutError; batch.is_none_or(|_| batch == own) => "batch", format!("{}, the layout's", own.unwrap_or(1)), batch.unwrap_or(1); }
        let batch = own;
        let mut builder = LayoutBuilder::new(MaskInterner::of(self.masks().to_vec()));
        for entry in 0..batch.unwrap_or(1) {
            for head in 0..self.heads() {
                let whole = &self.inner().patterns[self.pattern_of(entry, head)];
                let mut rows = RowRuns::new();
                for q_block in 0..self.q_blocks() {
                    for block in whole.row(q_block) {
                        let mut run = Run::one(block.block, block.mask);
                        if let Some(mask) = mask(entry, head, q_block, &run, &mut builder.masks) {
                            run.mask = mask;
                            rows.push(run);
                        }
                    }
                    rows.end_row();
                }
                builder.push(rows);
            }
        }
        Ok(builder.finish(name, *self.shape(), batch))
    }
}
