//! Rows of a tensor by an index, with a gradient that is also a gather.
#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
pub mod ops;
pub mod reference;
pub mod values;

use crate::base::prelude::*;
use crate::check::same_device;
use crate::rows::ops::RowOps;

/// Gathers the rows of each head that `index` lists, or 0 where it is negative. The gradient is a gather rather than a scatter: `users` lists for each row of
/// `x` the places of `index` that use it, and the row's gradient is the sum of theirs. So both passes are bit-deterministic.
///
/// `users` must be the inverse of `index`; its negative entries are ignored. This is not checked, because neither is read back from the device:
/// indices beyond the rows or places behave as in the backend's `select`.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_blocksparse::internal::gather_rows;
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<4>::from_data([[[[1.0], [2.0], [3.0]]]], &device).require_grad();
/// let index = Tensor::<3, Int>::from_data([[[2, -1, 0, 2]]], &device);
/// let users = Tensor::<4, Int>::from_data([[[[2, -1], [-1, -1], [0, 3]]]], &device);
/// let rows = gather_rows(x.clone(), index, users)?;
/// assert_eq!(rows.to_data().to_vec::<f32>().unwrap(), [3.0, 0.0, 1.0, 3.0]);
/// let by_x = x.grad(&rows.sum().backward()).unwrap();
/// assert_eq!(by_x.into_data().to_vec::<f32>().unwrap(), [1.0, 0.0, 2.0]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `x`: `[batch, heads, rows, dim]`, at least one row
/// - `index`: `[batch, heads, places]`, of rows
/// - `users`: `[batch, heads, rows, most]`, of places
/// - result: `[batch, heads, places, dim]`
///
/// # Errors
/// [`OpError`] if shapes or devices do not fit each other, or no feature of this crate serves the device.
pub fn gather_rows(
    x: Tensor<4>,
    index: Tensor<3, Int>,
    users: Tensor<4, Int>,
) -> Result<Tensor<4>, OpError> {
    let [.., rows, _] = x.dims();
    let (index, users) = checked(&x, rows, index, users)?;
    let rows = <Dispatch as RowOps>::gather_rows(
        x.into_dispatch(),
        index.into_dispatch(),
        users.into_dispatch(),
    );
    Ok(Tensor::from_dispatch(rows))
}

/// Sums the rows of `x` that `users` lists, ignoring negative indices, in f32 (f64 for f64) and rounds once. This is the transpose of [`gather_rows`]: each is
/// the gradient of the other.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_blocksparse::internal::segment_sum;
///
/// let device = Device::flex();
/// let x = Tensor::<4>::from_data([[[[1.0], [2.0], [3.0], [4.0]]]], &device);
/// let index = Tensor::<3, Int>::from_data([[[2, -1, 0, 2]]], &device);
/// let users = Tensor::<4, Int>::from_data([[[[2, -1], [-1, -1], [0, 3]]]], &device);
/// let sums = segment_sum(x, index, users)?;
/// assert_eq!(sums.into_data().to_vec::<f32>().unwrap(), [3.0, 0.0, 5.0]);
/// # Ok::<(), burn_blocksparse::OpError>(())
/// ```
///
/// # Shapes
/// - `x`: `[batch, heads, places, dim]`
/// - `index`: `[batch, heads, places]`, of rows
/// - `users`: `[batch, heads, rows, most]`, of places
/// - result: `[batch, heads, rows, dim]`
///
/// # Errors
/// As [`gather_rows`].
pub fn segment_sum(
    x: Tensor<4>,
    index: Tensor<3, Int>,
    users: Tensor<4, Int>,
) -> Result<Tensor<4>, OpError> {
    let [.., rows, _] = users.dims();
    OpError::expect_same("x's places", index.dims()[2], "the index's", x.dims()[2])?;
    let (index, users) = checked(&x, rows, index, users)?;
    let sums = <Dispatch as RowOps>::segment_sum(
        x.into_dispatch(),
        index.into_dispatch(),
        users.into_dispatch(),
    );
    Ok(Tensor::from_dispatch(sums))
}

/// Checks indices of rows and places against `x`: its batch, heads and device, and the number of rows. Detaches them from the graph.
fn checked(
    x: &Tensor<4>,
    rows: usize,
    index: Tensor<3, Int>,
    users: Tensor<4, Int>,
) -> Result<(Tensor<3, Int>, Tensor<4, Int>), OpError> {
    served(&x.device())?;
    same_device("index's device", &x.device(), "x's", &index.device())?;
    same_device("users' device", &x.device(), "x's", &users.device())?;
    let [batch, heads, ..] = x.dims();
    let [index_batch, index_heads, places] = index.dims();
    let [users_batch, users_heads, users_rows, most] = users.dims();
    let own = [batch, heads];
    OpError::expect_same("index's heads", own, "x's", [index_batch, index_heads])?;
    let all = [batch, heads, rows];
    let got = [users_batch, users_heads, users_rows];
    OpError::expect_same("users' rows", all, "x's", got)?;
    for (argument, number) in [
        ("x's rows", rows),
        ("index's places", places),
        ("users' width", most),
    ] {
        OpError::ensure_positive(argument, number)?;
    }
    Ok((index.without_autodiff(), users.without_autodiff()))
}
