//! Primitives of token clustering and hashing: products of rows, top-k of rows, and tokens sorted by bucket.

#[cfg(feature = "cube")]
use crate::selection::estimator::EstimateInputs;
use crate::selection::ops::SelectionOps;
use crate::selection::products;
use crate::selection::values::QueryTiles;
#[cfg(feature = "cube")]
use crate::selection::{estimate_ops::ScoredBy, estimates};
use burn_blocksparse::internal::prelude::*;

/// Computes `a · bᵀ` of each head, without autodiff: f64 in f64, all other dtypes in f32. Where kernels run, this holds even on devices that round the factors
/// of Burn's products.
///
/// # Shapes
/// - `a`: `[batch, heads, rows, width]`, `b`: `[batch, kv_heads, columns, width]`, of one dtype; `kv_heads` divides `heads`
/// - result: `[batch, heads, rows, columns]`
pub fn row_products(a: Tensor<4>, b: Tensor<4>) -> Tensor<4> {
    let (a, b) = (a.without_autodiff(), b.without_autodiff());
    let group = a.dims()[1] / b.dims()[1];
    if a.dtype() == DType::F64 {
        return products(a, b, group);
    }
    // A block of one row is its own mean, so the kernel of block means applies.
    #[cfg(feature = "cube")]
    {
        let rows = a.dims()[2];
        let call = EstimateInputs::new(a.clone(), b.clone())
            .scale(1.0)
            .causal(false);
        if let Some(products) = estimates::scores(&call, 1, &(0..rows), ScoredBy::Means) {
            return products;
        }
    }
    products(a.cast(DType::F32), b.cast(DType::F32), group)
}

/// Sorts tokens by bucket, stable within a bucket. Returns the token at each place, −1 after the last, and the place of each token. It uses the inverse lists
/// of queries that select one block each, in tiles of one place.
///
/// # Shapes
/// - `buckets`: `[batch, lists, length]`, each from 0 and below `count`
/// - results: i32 `[batch, lists, room]` and `[batch, lists, length]`, without autodiff
///
/// # Errors
/// [`OpError`] if there are no tokens or buckets, fewer places than tokens, or no feature of this crate serves the device.
pub fn sort_by_bucket(
    buckets: Tensor<3, Int>,
    count: usize,
    room: usize,
) -> Result<[Tensor<3, Int>; 2], OpError> {
    let buckets = buckets.without_autodiff();
    served(&buckets.device())?;
    let dims @ [batch, lists, length] = buckets.dims();
    blocksparse::ensure! {
        OpError;
        batch * lists * length != 0 => "buckets", "at least one token", 0;
        count > 0 => "count", "at least 1", count;
        room >= length => "room", format!("at least the {length} tokens"), room;
    }
    let wanted = QueryTiles {
        blocks: count,
        tiles: room,
        tile: 1,
    };
    let chosen = buckets.reshape([batch, lists, length, 1]).into_dispatch();
    let sorted = <Dispatch as SelectionOps>::list_queries(chosen, wanted);
    let places = Tensor::<4, Int>::from_dispatch(sorted.places);
    Ok([Tensor::from_dispatch(sorted.choices), places.reshape(dims)])
}

/// Top-k of each row and the index of each column in it, as returned by [`topk_rows`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TopKRows {
    /// Selected columns, ascending: i32 `[groups, rows, most]`.
    pub columns: Tensor<3, Int>,
    /// For each element of each row `row · most` plus its index in the row's list, or −1: i32 `[groups, rows, columns]`.
    pub places: Tensor<3, Int>,
}

/// Returns the `most` highest elements of each row. Ties go to the earlier column; NaN sorts last. Kernels compare in f32 and read nothing back.
///
/// # Shapes
/// - `numbers`: `[groups, rows, columns]`
///
/// # Errors
/// [`OpError`] if `most` is not from 1 to the number of columns, there are no rows, or no feature of this crate serves the device.
pub fn topk_rows(numbers: Tensor<3>, most: usize) -> Result<TopKRows, OpError> {
    let numbers = numbers.without_autodiff();
    served(&numbers.device())?;
    let [groups, rows, columns] = numbers.dims();
    blocksparse::ensure! {
        OpError;
        groups * rows != 0 => "numbers", "at least one row", 0;
        (1..=columns).contains(&most) => "most", format!("from 1 to the {columns} columns"), most;
    }
    let found = <Dispatch as SelectionOps>::topk_rows(numbers.into_dispatch(), most);
    Ok(TopKRows {
        columns: Tensor::from_dispatch(found.columns),
        places: Tensor::from_dispatch(found.places),
    })
}
