//! What an index branch makes of tokens.

use std::f64::consts::SQRT_2;

use burn::tensor::{DType, Tensor};
use burn_blocksparse::OpError;

use crate::dsa::{DsaIndex, check_index};

/// Queries and keys that blocks are chosen by: a head of queries for each head of the attention's keys, and one key a token for all of them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MsaIndex {
    /// `[batch, kv_heads, seq_q, index_dim]`
    pub q: Tensor<4>,
    /// `[batch, 1, seq_kv, index_dim]`
    pub k: Tensor<4>,
}

impl MsaIndex {
    /// The last query sits at the last key.
    ///
    /// # Shapes
    /// As the fields have them.
    ///
    /// # Errors
    /// [`OpError`] if shapes or devices do not fit each other, if a size is 0, or if there are more queries than keys.
    pub fn new(q: Tensor<4>, k: Tensor<4>) -> Result<Self, OpError> {
        check_index(&q, &k)?;
        Ok(Self { q, k })
    }

    /// The same with other keys, as a cache has them.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_keys(self, k: Tensor<4>) -> Result<Self, OpError> {
        Self::new(self.q, k)
    }

    pub(super) fn seq_kv(&self) -> usize {
        self.k.dims()[2]
    }

    pub(super) fn without_autodiff(self) -> Self {
        Self {
            q: self.q.without_autodiff(),
            k: self.k.without_autodiff(),
        }
    }

    /// So many queries, with the keys up to the last of them.
    pub(super) fn of_rows(&self, rows: std::ops::Range<usize>) -> Self {
        let [_, _, seq_q, _] = self.q.dims();
        let end = rows.end + self.seq_kv() - seq_q;
        Self {
            q: self.q.clone().slice_dim(2, rows),
            k: self.k.clone().slice_dim(2, 0..end),
        }
    }

    /// The index of [`Dsa`](crate::dsa::Dsa) with the same scores, of which each head of keys is a batch entry: `z = relu(z) − relu(−z)`, so two of its heads are
    /// one of these.
    pub(super) fn of_groups(&self) -> Result<DsaIndex, OpError> {
        let [batch, groups, seq_q, width] = self.q.dims();
        let seq_kv = self.seq_kv();
        let all = batch * groups;
        let q = self.q.clone().reshape([all, 1, seq_q, width]);
        let k = self.k.clone().expand([batch, groups, seq_kv, width]);
        let dtype = match q.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        // The scale there is 1/√(2 · width).
        let weights = Tensor::full([all, 1, seq_q], SQRT_2, (&q.device(), dtype));
        DsaIndex::new(
            Tensor::cat(vec![q.clone(), q.neg()], 1),
            k.reshape([all, 1, seq_kv, width]),
            Tensor::cat(vec![weights.clone(), weights.neg()], 1),
        )
    }
}
