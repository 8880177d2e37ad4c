//! Selections restricted by a layout and by padding.

use std::ops::Range;

use blocksparse::{BlockLayout, LayoutShape, PaddingMask, Pattern};
use burn::tensor::{DType, Tensor};

use crate::selection::estimator::{EstimateInputs, ReferenceInputs};
use crate::selection::layouts::LayoutCache;
use crate::selection::parts::{joined, padded};
use crate::selection::{SelectedLayout, Selection};
use burn_blocksparse::layout::DeviceLayoutOptions;
use burn_blocksparse::{DeviceLayout, OpError};

/// Restriction of a selection's candidates, for [`Selection::choose_among`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct Candidates<'a> {
    /// Layout of a static pattern, with the selection's block size.
    pub layout: Option<&'a BlockLayout>,
    /// Number of real positions of each batch entry; all later ones are padding.
    pub lengths: Option<&'a [usize]>,
}

impl<'a> Candidates<'a> {
    blocksparse::setters! {
        /// Sets the layout that provides the candidates, forced blocks included. A selected block has the pairs that it has in this layout. So the layout
        /// determines visibility, and [`EstimateInputs::causal`] only affects the scores.
        layout: Some(&'a BlockLayout),
        /// Sets the real length of each batch entry. Padding never influences the selection; padded queries see nothing.
        lengths: Some(&'a [usize]),
    }

    /// Checks that the lengths match a call.
    fn check(&self, [batch, seq_q, seq_kv]: [usize; 3]) -> Result<(), OpError> {
        let Some(lengths) = self.lengths else {
            return Ok(());
        };
        blocksparse::ensure! {
            OpError;
            seq_q == seq_kv => "q's seq_q", format!("{seq_kv}, that of the keys, with lengths"), seq_q;
            lengths.len() == batch => "lengths' number", format!("{batch}, one for each batch entry"), lengths.len();
        }
        match lengths.iter().find(|&&length| length > seq_kv) {
            None => Ok(()),
            Some(length) => {
                let expected = format!("at most {seq_kv}, the number of keys");
                Err(OpError::argument("lengths", expected, length))
            }
        }
    }

    /// Returns the layout that combines both restrictions, if there is one. Layouts of recent lengths are cached with the layout that they restrict.
    fn whole(
        &self,
        known: &LayoutCache,
        shape: LayoutShape,
        causal: bool,
    ) -> Result<Option<BlockLayout>, OpError> {
        let Some(lengths) = self.lengths else {
            return Ok(self.layout.cloned());
        };
        let base = match self.layout {
            Some(layout) => layout.clone(),
            None if causal => known.of_pattern(&Pattern::causal(), shape)?,
            None => known.of_pattern(&Pattern::dense(), shape)?,
        };
        let of_lengths = base.attachment(LayoutCache::default);
        let masked = of_lengths.get(format!("{lengths:?}"), shape, || {
            let entries = lengths.iter().map(|&length| {
                let real = |seq: usize| (0..seq).map(move |i| i < length);
                let entry = PaddingMask::default().queries(real(shape.seq_q));
                entry.keys(real(shape.seq_kv))
            });
            base.mask_padding(&entries.collect::<Vec<_>>())
        });
        Ok(Some(masked?))
    }
}

impl Selection {
    /// Runs [`choose`](Self::choose) restricted to the blocks of a layout, for batch entries with padding, or both. Reads nothing back.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_blocksparse::Pattern;
    /// use burn_sparse_select::{EstimateInputs, Selection, Candidates};
    ///
    /// let [q, k] = [(); 2]
    ///     .map(|_| Tensor::<4>::random([2, 2, 256, 16], Distribution::Default, &Device::flex()));
    /// let selection: Selection = "topk:32,4".parse()?;
    /// // Of the last 200 keys; the second sequence ends after 150.
    /// let near = Pattern::local(200).layout(2, 256, 32)?;
    /// let within = Candidates::default().layout(&near).lengths(&[256, 150]);
    /// let chosen = selection.choose_among(&EstimateInputs::new(q, k), within)?;
    /// assert_eq!(chosen.layout.batch(), Some(2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`choose`](Self::choose). Also if the layout has other sizes or blocks than the selection, or if lengths do not match the batch, exceed the
    /// sequence, or are used where queries and keys differ in number.
    pub fn choose_among(
        &self,
        call: &EstimateInputs,
        within: Candidates,
    ) -> Result<SelectedLayout, OpError> {
        self.check_for(call)?;
        let [batch, _, seq_q, _] = call.q.dims();
        let seq_kv = call.k.dims()[2];
        let shape = self.shape(call.q.dims(), seq_kv)?;
        within.check([batch, seq_q, seq_kv])?;
        let call = call.without_autodiff();
        let scores = self.scores_of(&call, within.lengths)?;
        let scores = self.sharing.reduce(scores, call.group());
        let options = DeviceLayoutOptions::new(shape).causal(call.causal);
        let layout = DeviceLayout::from_scores(scores, self.rule(), options)?;
        let layout = match within.whole(&self.layouts, shape, call.causal)? {
            None => layout,
            Some(whole) => layout.masked_by(&whole)?,
        };
        Ok(SelectedLayout { layout })
    }

    /// Computes the scores of all rows, of each batch entry as if it had no padding. Scores of padding are 0.
    fn scores_of(
        &self,
        call: &EstimateInputs,
        lengths: Option<&[usize]>,
    ) -> Result<Tensor<4>, OpError> {
        let grid = call.grid(self.estimator.grid());
        let Some(lengths) = lengths.filter(|of| of.iter().any(|&length| length < grid.seq_q))
        else {
            return self.estimator.scores(call, 0..grid.rows());
        };
        let [_, heads, ..] = call.q.dims();
        let mut parts = Vec::new();
        for (entries, length) in stretches(lengths) {
            let part = |x: &Tensor<4>| {
                let entries = x.clone().slice_dim(0, entries.clone());
                entries.slice_dim(2, 0..length)
            };
            if length == 0 {
                let dims = [entries.len(), heads, grid.rows(), grid.blocks()];
                parts.push(Tensor::zeros(dims, (&call.q.device(), DType::F32)));
                continue;
            }
            let call = EstimateInputs {
                q: part(&call.q),
                k: part(&call.k),
                ..*call
            };
            let own = call.grid(self.estimator.grid());
            let scores = self.estimator.scores(&call, 0..own.rows())?;
            let scores = padded(scores, 2, [0, grid.rows() - own.rows()]);
            parts.push(padded(scores, 3, [0, grid.blocks() - own.blocks()]));
        }
        Ok(joined(parts, 0))
    }

    /// Computes [`choose_among`](Self::choose_among) for batch entry `entry` in f64 loops on the host.
    ///
    /// # Errors
    /// Those of [`choose_among`](Self::choose_among).
    pub fn choose_reference_within(
        &self,
        call: &ReferenceInputs,
        within: Candidates,
        entry: usize,
    ) -> Result<BlockLayout, OpError> {
        self.check()?;
        let dims = [1, call.heads, call.seq_q, call.head_dim];
        let shape = self.shape(dims, call.seq_kv)?;
        let batch = within.lengths.map_or(1, <[usize]>::len);
        within.check([batch, call.seq_q, call.seq_kv])?;
        let Some(whole) = within.whole(&self.layouts, shape, call.causal)? else {
            return self.choose_reference(call);
        };
        let grid = call.grid(self.estimator.grid());
        let length = within.lengths.map_or(call.seq_q, |lengths| lengths[entry]);
        let scores = self.scores_reference(call, length);
        let group = call.heads / call.kv_heads;
        let scores = self.sharing.reduce_reference(scores, call.heads, group);
        let patterns = scores.len() / (grid.rows() * grid.blocks()).max(1);
        let rule = self.rule();
        let entry = entry.min(whole.batch().unwrap_or(1) - 1);
        // With a layout, the layout alone determines visibility.
        let seen = blocksparse::ScoreGrid {
            causal: false,
            ..grid
        };
        let layout = BlockLayout::from_block_fn(whole.name(), shape, |head, q_block, kv_block| {
            let pattern = head / (call.heads / patterns);
            let row = pattern * grid.rows() + q_block;
            let scores = &scores[row * grid.blocks()..][..grid.blocks()];
            let own = whole.row(whole.pattern_of(entry, head), q_block);
            let mut masks = vec![None; grid.blocks()];
            for block in own {
                masks[block.block as usize] = Some(block.mask);
            }
            let kept = rule.selects_of(&seen, q_block, scores, |block| masks[block].is_some());
            let mask = masks[kv_block].filter(|_| kept[kv_block]);
            mask.map(|mask| whole.masks()[mask as usize].clone())
        });
        Ok(layout?)
    }

    /// Returns the scores of an entry with `length` real positions.
    fn scores_reference(&self, call: &ReferenceInputs, length: usize) -> Vec<f64> {
        if length == call.seq_q {
            return self.estimator.reference(call);
        }
        let grid = call.grid(self.estimator.grid());
        let mut scores = vec![0.0; call.heads * grid.rows() * grid.blocks()];
        if length == 0 {
            return scores;
        }
        let real = |x: &[f64], seq: usize| -> Vec<f64> {
            let heads = x.chunks(seq * call.head_dim);
            let real = heads.flat_map(|head| &head[..length * call.head_dim]);
            real.copied().collect()
        };
        let (q, k) = (real(call.q, call.seq_q), real(call.k, call.seq_kv));
        let real = ReferenceInputs {
            q: &q,
            k: &k,
            seq_q: length,
            seq_kv: length,
            ..*call
        };
        let own = real.grid(self.estimator.grid());
        let found = self.estimator.reference(&real);
        for (row, found) in found.chunks(own.blocks()).enumerate() {
            let row = row / own.rows() * grid.rows() + row % own.rows();
            scores[row * grid.blocks()..][..own.blocks()].copy_from_slice(found);
        }
        scores
    }
}

/// Groups adjacent entries of equal length.
fn stretches(lengths: &[usize]) -> Vec<(Range<usize>, usize)> {
    let mut stretches: Vec<(Range<usize>, usize)> = Vec::new();
    for (entry, &length) in lengths.iter().enumerate() {
        match stretches.last_mut() {
            Some((entries, known)) if *known == length => entries.end = entry + 1,
            _ => stretches.push((entry..entry + 1, length)),
        }
    }
    stretches
}
