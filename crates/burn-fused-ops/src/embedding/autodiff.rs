//! Autodiff of embeddings.

use crate::embedding::ops::EmbeddingOps;
use burn_blocksparse::internal::custom_gradient::*;
use burn_blocksparse::internal::prelude::*;

impl<B: EmbeddingOps, C: CheckpointStrategy> EmbeddingOps for Autodiff<B, C> {
    fn table_rows(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        custom_gradient::<B, C, _, _>([Some(table)], nothing, |[table], _| {
            let table = there(table);
            let (vocab, dtype) = (table.shape()[0], own_dtype(&table));
            let rows = B::table_rows(table, ids.clone());
            (rows, move |_, grad| {
                [Some(B::table_gradient(ids, grad, vocab, dtype))]
            })
        })
    }
}
