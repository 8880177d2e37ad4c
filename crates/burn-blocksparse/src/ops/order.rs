//! The backend trait of orders, where kernels make them.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};

/// Sorts and lists as backend operations, on devices that have kernels alone, of i32 tensors. Elsewhere the functions that use them use Burn's operations.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait OrderOps: Backend {
    /// The token at each place of `[groups, length]`, sorted by bucket, and the place of each token: `[2, groups, length]`.
    #[fusion(meta = meta::sorted)]
    fn sort_buckets(buckets: IntTensor<Self>, count: usize) -> IntTensor<Self>;

    /// Where numbers below `length` stand in ascending lists `[groups, lists, width]`: `[groups, length, lists]`.
    #[fusion(meta = meta::places)]
    fn places_in_lists(lists: IntTensor<Self>, length: usize) -> IntTensor<Self>;
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::DType;

    pub fn sorted(buckets: &TensorSpec, _count: &usize) -> TensorSpec {
        let [groups, length] = buckets.shape.dims::<2>();
        TensorSpec::new([2, groups, length].into(), DType::I32)
    }

    pub fn places(lists: &TensorSpec, length: &usize) -> TensorSpec {
        let [groups, count, _] = lists.shape.dims::<3>();
        TensorSpec::new([groups, *length, count].into(), DType::I32)
    }
}
