//! The backend trait of rows that are taken by an index.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};

use crate::rows::reference;

/// Rows by an index and the gradient by them as backend operations. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait RowOps: Backend {
    /// The rows of `[batch, heads, rows, dim]` at `[batch, heads, places]`, 0 where that is negative: `[batch, heads, places, dim]`. `users` is for the
    /// gradient.
    #[fusion(meta = meta::rows)]
    fn rows_at(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let _ = users;
        reference::rows_at::<Self>(x, index)
    }

    /// The gradient by the rows: the sum of `grad` over the places `[batch, heads, rows, most]` that use a row.
    #[fusion(meta = meta::gradient)]
    fn rows_at_backward(grad: FloatTensor<Self>, users: IntTensor<Self>) -> FloatTensor<Self> {
        reference::rows_at_backward::<Self>(grad, users)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    pub fn rows(x: &TensorSpec, index: &TensorSpec, _users: &TensorSpec) -> TensorSpec {
        let [batch, heads, places] = index.shape.dims::<3>();
        TensorSpec::new([batch, heads, places, x.shape[3]].into(), x.dtype)
    }

    pub fn gradient(grad: &TensorSpec, users: &TensorSpec) -> TensorSpec {
        let [batch, heads, rows, _] = users.shape.dims::<4>();
        TensorSpec::new([batch, heads, rows, grad.shape[3]].into(), grad.dtype)
    }
}
