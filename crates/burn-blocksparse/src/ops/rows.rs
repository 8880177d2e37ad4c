//! The backend trait of rows that are taken by an index.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::rows::reference;

/// Rows of two tensors to be added up, as [`RowOps::merged_rows`] takes them.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergedRows<B: Backend> {
    /// A row of each query: `[batch, heads, queries, dim]`.
    pub own: FloatTensor<B>,
    /// Rows at places: `[batch, heads, places, dim]`, in the same dtype.
    pub rows: FloatTensor<B>,
    /// What a query's own row, and those of its places, are multiplied by: `[batch, heads, queries, 1 + most]`, in the dtype of sums.
    pub weights: FloatTensor<B>,
    /// The places of each query: `[batch, heads, queries, most]`, negative for none.
    pub places: IntTensor<B>,
    /// The query at each place, times `most`, plus the number among the query's: `[batch, heads, places]`, negative for none.
    pub choices: IntTensor<B>,
}

/// Gradients by the floats of [`MergedRows`].
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergedRowsGrads<B: Backend> {
    /// By a query's own row.
    pub own: FloatTensor<B>,
    /// By the rows at places.
    pub rows: FloatTensor<B>,
    /// By the weights.
    pub weights: FloatTensor<B>,
}

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

    /// The sums of the rows of `[batch, heads, places, dim]` at the places `[batch, heads, rows, most]`. `index` is for the gradient.
    #[fusion(meta = meta::sums)]
    fn sums_at(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let _ = index;
        Self::rows_at_backward(x, users)
    }

    /// `w₀ · own + Σ wⱼ · rows[placeⱼ]` of each query, `[batch, heads, queries, dim]`, summed in the dtype of the weights.
    #[fusion(meta = meta::merged)]
    fn merged_rows(#[extension_type] inputs: MergedRows<Self>) -> FloatTensor<Self> {
        reference::merged_rows::<Self>(inputs)
    }

    /// The gradients of [`merged_rows`](Self::merged_rows), of its inputs and the gradient by its output.
    #[fusion(meta = meta::merged_gradients)]
    fn merged_rows_backward(
        #[extension_type] inputs: MergedRows<Self>,
        grad: FloatTensor<Self>,
    ) -> MergedRowsGrads<Self> {
        reference::merged_rows_backward::<Self>(inputs, grad)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::{MergedRowsGradsMetadata, MergedRowsMetadata};

    pub fn rows(x: &TensorSpec, index: &TensorSpec, _users: &TensorSpec) -> TensorSpec {
        let [batch, heads, places] = index.shape.dims::<3>();
        TensorSpec::new([batch, heads, places, x.shape[3]].into(), x.dtype)
    }

    pub fn merged(inputs: &MergedRowsMetadata) -> TensorSpec {
        inputs.own.clone()
    }

    pub fn merged_gradients(
        inputs: &MergedRowsMetadata,
        _grad: &TensorSpec,
    ) -> MergedRowsGradsMetadata {
        MergedRowsGradsMetadata {
            own: inputs.own.clone(),
            rows: inputs.rows.clone(),
            weights: inputs.weights.clone(),
        }
    }

    pub fn sums(x: &TensorSpec, _index: &TensorSpec, users: &TensorSpec) -> TensorSpec {
        gradient(x, users)
    }

    pub fn gradient(grad: &TensorSpec, users: &TensorSpec) -> TensorSpec {
        let [batch, heads, rows, _] = users.shape.dims::<4>();
        TensorSpec::new([batch, heads, rows, grad.shape[3]].into(), grad.dtype)
    }
}
