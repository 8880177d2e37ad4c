//! The backend trait of rows that are taken by an index.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::Shape;

#[cfg(feature = "fusion")]
use crate::base::dtype::sums_of;
use crate::base::values::OutputGrads;
use crate::reference_backends;
use crate::rows::reference;
use crate::rows::values::{
    KeyedGrads, KeyedRows, MeanRows, MergedGrads, MergedOutput, MergedParts,
};

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
    #[fusion(dtype = x, shape = at_places(index, x))]
    fn gather_rows(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let _ = users;
        reference::gather_rows::<Self>(x, index)
    }

    /// The gradient by the rows: the sum of `grad` over the places `[batch, heads, rows, most]` that use a row.
    #[fusion(dtype = grad, shape = at_users(users, grad))]
    fn rows_at_backward(grad: FloatTensor<Self>, users: IntTensor<Self>) -> FloatTensor<Self> {
        reference::rows_at_backward::<Self>(grad, users)
    }

    /// The sums of the rows of `[batch, heads, places, dim]` at the places `[batch, heads, rows, most]`. `index` is for the gradient.
    #[fusion(dtype = x, shape = at_users(users, x))]
    fn segment_sum(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let _ = index;
        Self::rows_at_backward(x, users)
    }

    /// The rows of `[batch, heads, rows, dim]` made as long as 1, in the dtype of sums.
    #[fusion(dtype = sums_of(x), shape = x)]
    fn l2_normalize(x: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::l2_normalize::<Self>(x)
    }

    /// The gradient by the rows.
    #[fusion(dtype = x, shape = x)]
    fn unit_rows_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        reference::unit_rows_backward::<Self>(grad, x)
    }

    /// The means of the rows of `[batch, heads, places, dim]` at the places `[batch, heads, rows, most]`, 0 where there are none. `index` is for the gradient.
    #[fusion(meta = meta::means)]
    fn segment_mean(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> MeanRows<Self> {
        let _ = index;
        reference::segment_mean::<Self>(x, users)
    }

    /// The gradient by the rows: `grad` of the row at each place of `[batch, heads, places]`, times its share.
    #[fusion(dtype = grad, shape = at_places(index, grad))]
    fn means_at_backward(
        grad: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        index: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        reference::means_at_backward::<Self>(grad, shares, index)
    }

    /// Rows of `x` at `[batch, heads, places]`, the same made as long as 1, and rows of `value`; 0 where the index is negative. `users` is for the gradient.
    #[fusion(meta = meta::keyed)]
    fn keyed_rows(
        x: FloatTensor<Self>,
        value: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> KeyedRows<Self> {
        let _ = users;
        reference::keyed_rows::<Self>(x, value, index)
    }

    /// The gradients of [`keyed_rows`](Self::keyed_rows), of those by its outputs, and the places `[batch, heads, rows, most]` that use a row.
    #[fusion(meta = meta::keyed_gradients)]
    fn keyed_rows_backward(
        #[extension_type] grads: KeyedRows<Self>,
        x: FloatTensor<Self>,
        users: IntTensor<Self>,
    ) -> KeyedGrads<Self> {
        reference::keyed_rows_backward::<Self>(grads, x, users)
    }

    /// `lse = ln Σ exp(lseᵢ)` and `out = Σ exp(lseᵢ − lse) · rowᵢ` over a query's own part and those at its places.
    #[fusion(meta = meta::merged)]
    fn merged_parts(#[extension_type] inputs: MergedParts<Self>) -> MergedOutput<Self> {
        reference::merged_parts::<Self>(inputs)
    }

    /// The gradients of [`merged_parts`](Self::merged_parts), of its inputs and the gradients by its outputs.
    #[fusion(meta = meta::merged_gradients)]
    fn merged_parts_backward(
        #[extension_type] inputs: MergedParts<Self>,
        #[extension_type] grads: OutputGrads<Self>,
    ) -> MergedGrads<Self> {
        reference::merged_parts_backward::<Self>(inputs, grads)
    }
}

reference_backends!(RowOps);

/// The shape of rows at places `[batch, heads, places]`.
#[cfg(feature = "fusion")]
fn at_places(index: &Shape, rows: &Shape) -> Shape {
    let [batch, heads, places] = index.dims::<3>();
    [batch, heads, places, rows[3]].into()
}

/// The shape of a row for each list of `[batch, heads, rows, most]`.
#[cfg(feature = "fusion")]
fn at_users(users: &Shape, rows: &Shape) -> Shape {
    let [batch, heads, count, _] = users.dims::<4>();
    [batch, heads, count, rows[3]].into()
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::base::values::OutputGradsMetadata;
    use crate::rows::values::{
        KeyedGradsMetadata, KeyedRowsMetadata, MeanRowsMetadata, MergedGradsMetadata,
        MergedOutputMetadata, MergedPartsMetadata,
    };

    pub fn merged(inputs: &MergedPartsMetadata) -> MergedOutputMetadata {
        MergedOutputMetadata {
            out: inputs.own.clone(),
            lse: inputs.own_lse.clone(),
        }
    }

    pub fn merged_gradients(
        inputs: &MergedPartsMetadata,
        _grads: &OutputGradsMetadata,
    ) -> MergedGradsMetadata {
        MergedGradsMetadata {
            own: inputs.own.clone(),
            own_lse: inputs.own_lse.clone(),
            rows: inputs.rows.clone(),
            lses: inputs.lses.clone(),
        }
    }

    pub fn keyed(
        x: &TensorSpec,
        value: &TensorSpec,
        index: &TensorSpec,
        _users: &TensorSpec,
    ) -> KeyedRowsMetadata {
        let rows = |x: &TensorSpec| TensorSpec::new(at_places(&index.shape, &x.shape), x.dtype);
        KeyedRowsMetadata {
            key: rows(x),
            query: rows(x),
            value: rows(value),
        }
    }

    pub fn keyed_gradients(
        grads: &KeyedRowsMetadata,
        x: &TensorSpec,
        users: &TensorSpec,
    ) -> KeyedGradsMetadata {
        let value = &grads.value;
        KeyedGradsMetadata {
            x: x.clone(),
            value: TensorSpec::new(at_users(&users.shape, &value.shape), value.dtype),
        }
    }

    pub fn means(x: &TensorSpec, _index: &TensorSpec, users: &TensorSpec) -> MeanRowsMetadata {
        let [batch, heads, rows, _] = users.shape.dims::<4>();
        MeanRowsMetadata {
            means: TensorSpec::new(at_users(&users.shape, &x.shape), x.dtype),
            shares: TensorSpec::new([batch, heads, rows].into(), sums_of(x.dtype)),
        }
    }
}
