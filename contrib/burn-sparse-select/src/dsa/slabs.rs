//! Scores for some queries at a time, by kernels where a device has them.

use std::ops::Range;

use burn::tensor::Tensor;

#[cfg(feature = "cube")]
use crate::dsa::kernels;
use crate::dsa::scores::{DsaIndex, Scores, together};
use crate::selection::parts::in_steps;

/// Returns whether kernels compute the scores of an index, about `numbers` at a time.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub(super) fn has_kernels(index: &DsaIndex, numbers: usize) -> bool {
    #[cfg(feature = "cube")]
    let is_served = kernels::has_scores(index, numbers);
    #[cfg(not(feature = "cube"))]
    let is_served = false;
    is_served
}

/// Scores of an index without autodiff.
pub(crate) struct Slabs<'a> {
    index: &'a DsaIndex,
    numbers: usize,
    /// Inputs of Burn's operations, if there are no kernels.
    operations: Option<Scores>,
}

impl<'a> Slabs<'a> {
    /// Creates slabs with about `numbers` scores in memory at a time.
    pub fn new(index: &'a DsaIndex, numbers: usize) -> Self {
        let is_served = has_kernels(index, numbers);
        Self {
            index,
            numbers,
            operations: (!is_served).then(|| Scores::new(index, numbers)),
        }
    }

    /// Returns whether kernels compute the scores.
    pub fn by_kernels(&self) -> bool {
        self.operations.is_none()
    }

    /// Returns the ranges of queries that are computed at once.
    pub fn rows(&self) -> Vec<Range<usize>> {
        let dims = self.index.q.dims();
        match &self.operations {
            Some(scores) => scores.slabs(scores.heads()),
            None => {
                let (rows, seq_q) = (together(dims, self.index.seq_kv(), self.numbers), dims[2]);
                in_steps(0..seq_q, rows).collect()
            }
        }
    }

    /// Computes the scores of a range of queries over all keys: `[batch, rows, seq_kv]`. Unless `all` is true, scores of keys after a query's position are
    /// unspecified. Kernels give the highest score to the last `near` keys up to it; Burn's operations do not.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn scores(&self, rows: Range<usize>, near: usize, all: bool) -> Tensor<3> {
        match &self.operations {
            Some(scores) => scores.of_rows(rows),
            #[cfg(feature = "cube")]
            None => kernels::scores(self.index, [rows.start, rows.len()], near, all),
            #[cfg(not(feature = "cube"))]
            None => unreachable!("there are no kernels"),
        }
    }
}
