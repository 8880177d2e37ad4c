//! The backend trait of embeddings.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn::tensor::FloatDType;

use crate::embedding::reference;

/// Rows of a table and the gradient by it as backend operations. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait EmbeddingOps: Backend {
    /// The rows of `[vocab, width]` that `[positions]` name: `[positions, width]`.
    #[fusion(meta = meta::rows)]
    fn table_rows(table: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        Self::float_select(table, 0, ids)
    }

    /// The gradient by the table, `[vocab, width]` in `dtype`.
    #[fusion(meta = meta::table)]
    fn table_gradient(
        ids: IntTensor<Self>,
        grad: FloatTensor<Self>,
        vocab: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        reference::table_gradient::<Self>(ids, grad, vocab, dtype)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;

    pub fn rows(table: &TensorSpec, ids: &TensorSpec) -> TensorSpec {
        TensorSpec::new([ids.shape[0], table.shape[1]].into(), table.dtype)
    }

    pub fn table(
        _ids: &TensorSpec,
        grad: &TensorSpec,
        vocab: &usize,
        dtype: &FloatDType,
    ) -> TensorSpec {
        TensorSpec::new([*vocab, grad.shape[1]].into(), (*dtype).into())
    }
}
