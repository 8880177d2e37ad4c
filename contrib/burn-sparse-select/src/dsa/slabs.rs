//! Scores of some queries at a time, by kernels where a device has them.

use std::ops::Range;

use burn::tensor::Tensor;

#[cfg(feature = "cube")]
use crate::dsa::kernels;
use crate::dsa::scores::{DsaIndex, Scores, together};
use crate::selection::parts::in_steps;

/// Whether kernels make the scores of an index, so many numbers at a time.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub(super) fn has_kernels(index: &DsaIndex, numbers: usize) -> bool {
    #[cfg(feature = "cube")]
    let is_served = kernels::has_scores(index, numbers);
    #[cfg(not(feature = "cube"))]
    let is_served = false;
    is_served
}

/// The scores of an index that is not on an autodiff device.
pub(crate) struct Slabs<'a> {
    index: &'a DsaIndex,
    numbers: usize,
    /// Where there are no kernels.
    operations: Option<Scores>,
}

impl<'a> Slabs<'a> {
    /// With so many scores in memory at a time.
    pub fn new(index: &'a DsaIndex, numbers: usize) -> Self {
        let is_served = has_kernels(index, numbers);
        Self {
            index,
            numbers,
            operations: (!is_served).then(|| Scores::new(index, numbers)),
        }
    }

    /// Returns whether kernels make them.
    pub fn by_kernels(&self) -> bool {
        self.operations.is_none()
    }

    /// Queries that are computed at once.
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

    /// Scores of some queries and all keys, `[batch, rows, seq_kv]`. If `all` are not wanted, those of keys after a query's position may say nothing, and
    /// kernels give the highest to so many keys up to it: operations do not.
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
