//! The backend trait of indexed rows.

use crate::base::prelude::*;
use crate::base::values::OutputGrads;
use crate::rows::reference;
use crate::rows::values::{MergedGrads, MergedOutput, MergedParts};
#[cfg(feature = "fusion")]
use crate::rows::values::{MergedGradsMetadata, MergedOutputMetadata};

/// Indexed rows and their gradients as backend operations. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait RowOps: Backend {
    /// Gathers the rows of `[batch, heads, rows, dim]` at `[batch, heads, places]`, 0 where that is negative: `[batch, heads, places, dim]`. `users` is only
    /// for the gradient.
    #[fusion(dtype = x, shape = at_places(index, x))]
    fn gather_rows(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let _ = users;
        reference::gather_rows::<Self>(x, index)
    }

    /// Computes the gradient with respect to the rows: the sum of `grad` over the places `[batch, heads, rows, most]` that use a row.
    #[fusion(dtype = grad, shape = at_users(users, grad))]
    fn rows_at_backward(grad: FloatTensor<Self>, users: IntTensor<Self>) -> FloatTensor<Self> {
        reference::rows_at_backward::<Self>(grad, users)
    }

    /// Sums the rows of `[batch, heads, places, dim]` at the places `[batch, heads, rows, most]`. `index` is only for the gradient.
    #[fusion(dtype = x, shape = at_users(users, x))]
    fn segment_sum(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        users: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let _ = index;
        Self::rows_at_backward(x, users)
    }

    /// Computes `lse = ln Σ exp(lseᵢ)` and `out = Σ exp(lseᵢ − lse) · rowᵢ` over a query's own part and those at its places.
    #[fusion(meta = |inputs| MergedOutputMetadata {
        out: inputs.own.clone(),
        lse: inputs.own_lse.clone(),
    })]
    fn merged_parts(#[extension_type] inputs: MergedParts<Self>) -> MergedOutput<Self> {
        reference::merged_parts::<Self>(inputs)
    }

    /// Computes the gradients of [`merged_parts`](Self::merged_parts) from its inputs and the gradients with respect to its outputs.
    #[fusion(meta = |inputs, _grads| MergedGradsMetadata {
        own: inputs.own.clone(),
        own_lse: inputs.own_lse.clone(),
        rows: inputs.rows.clone(),
        lses: inputs.lses.clone(),
    })]
    fn merged_parts_backward(
        #[extension_type] inputs: MergedParts<Self>,
        #[extension_type] grads: OutputGrads<Self>,
    ) -> MergedGrads<Self> {
        reference::merged_parts_backward::<Self>(inputs, grads)
    }
}

reference_backends!(RowOps);

/// Returns the shape of rows gathered at places `[batch, heads, places]`.
#[cfg(feature = "fusion")]
fn at_places(index: &Shape, rows: &Shape) -> Shape {
    let [batch, heads, places] = index.dims::<3>();
    [batch, heads, places, rows[3]].into()
}

/// Returns the shape with one row per list of `[batch, heads, rows, most]`.
#[cfg(feature = "fusion")]
fn at_users(users: &Shape, rows: &Shape) -> Shape {
    let [batch, heads, count, _] = users.dims::<4>();
    [batch, heads, count, rows[3]].into()
}
