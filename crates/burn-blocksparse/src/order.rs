//! Which numbers are the highest, and where, on devices with kernels: what chooses single tokens by content.

#[cfg(feature = "cube")]
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::device::served;
use crate::error::OpError;
use crate::kernels_run::runs_kernels;
#[cfg(feature = "cube")]
use crate::ops::OrderOps;
use crate::paged::highest_keys;

/// Tokens in the order of their buckets, those of a bucket by number: the token at each place, and the place of each token. `None` where
/// [no kernels run](runs_kernels). Nothing is read back.
///
/// # Shapes
/// - `buckets`: `[groups, length]`, each below `count`; others count as the nearest that is
/// - results: i32 `[groups, length]`, without autodiff
///
/// # Errors
/// [`OpError`] if there are no tokens, or not 1 to 2³⁰ buckets, or no feature of this crate serves the device.
pub fn sort_buckets(
    buckets: Tensor<2, Int>,
    count: usize,
) -> Result<Option<[Tensor<2, Int>; 2]>, OpError> {
    let buckets = buckets.without_autodiff();
    served(&buckets.device())?;
    let [groups, length] = buckets.dims();
    if groups * length == 0 {
        return Err(OpError::argument("buckets", "at least one token", 0));
    }
    if !(1..=1 << 30).contains(&count) {
        return Err(OpError::argument("count", "from 1 to 2³⁰", count));
    }
    if !runs_kernels(&buckets.device()) {
        return Ok(None);
    }
    #[cfg(feature = "cube")]
    {
        let order = <Dispatch as OrderOps>::sort_buckets(buckets.into_dispatch(), count);
        let order = Tensor::<3, Int>::from_dispatch(order);
        let part = |at: usize| {
            let part = order.clone().slice_dim(0, at..at + 1);
            part.reshape([groups, length])
        };
        Ok(Some([part(0), part(1)]))
    }
    #[cfg(not(feature = "cube"))]
    unreachable!("kernels need the feature cube")
}

/// Lists of the highest numbers of each row, and where numbers stand in them, as [`highest_in_rows`] gives them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HighestInRows {
    /// The columns, ascending: i32 `[groups, rows, most]`.
    pub columns: Tensor<3, Int>,
    /// Where each column stands in the list of each row: `row · most` and its place in the list, or −1: i32 `[groups, columns, rows]`.
    pub places: Tensor<3, Int>,
}

/// The `most` highest numbers of each row: of equal ones the earlier, NaN is the lowest, and numbers are compared in f32. `None` where
/// [no kernels run](runs_kernels). Nothing is sorted or read back.
///
/// # Shapes
/// - `numbers`: `[groups, rows, columns]`
///
/// # Errors
/// [`OpError`] if `most` is not from 1 to the columns, there are no rows, or no feature of this crate serves the device.
pub fn highest_in_rows(numbers: Tensor<3>, most: usize) -> Result<Option<HighestInRows>, OpError> {
    let numbers = numbers.without_autodiff();
    let device = numbers.device();
    served(&device)?;
    let [groups, rows, columns] = numbers.dims();
    if groups * rows == 0 {
        return Err(OpError::argument("numbers", "at least one row", 0));
    }
    if !(1..=columns).contains(&most) {
        let expected = format!("from 1 to the {columns} columns");
        return Err(OpError::argument("most", expected, most));
    }
    if !runs_kernels(&device) {
        return Ok(None);
    }
    let seen = Tensor::<2, Int>::full([1, rows], columns as i32, (&device, DType::I32));
    let lists = highest_keys(numbers, seen.expand([groups, rows]), most);
    #[cfg(feature = "cube")]
    {
        let given = lists.clone().into_dispatch();
        let places = <Dispatch as OrderOps>::places_in_lists(given, columns);
        Ok(Some(HighestInRows {
            columns: lists,
            places: Tensor::from_dispatch(places),
        }))
    }
    #[cfg(not(feature = "cube"))]
    unreachable!("kernels need the feature cube: {lists:?}")
}
