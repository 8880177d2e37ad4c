//! The backend trait of embeddings.

use crate::embedding::reference;
use burn_blocksparse::internal::prelude::*;

/// Embedding lookup and its gradient as backend operations. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait EmbeddingOps: Backend {
    /// Gathers the rows `ids`, `[positions]`, of `table`, `[vocab, width]`, into `[positions, width]`.
    #[fusion(dtype = table, shape = [ids[0], table[1]].into())]
    fn table_rows(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        Self::float_select(table, 0, ids)
    }

    /// Returns the gradient with respect to the table, `[vocab, width]` in `dtype`.
    #[fusion(dtype = (*dtype).into(), shape = [*vocab, grad[1]].into())]
    fn table_gradient(
        ids: IntTensor<Self>,
        grad: FloatTensor<Self>,
        vocab: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        reference::table_gradient::<Self>(ids, grad, vocab, dtype)
    }
}

reference_backends!(EmbeddingOps);
