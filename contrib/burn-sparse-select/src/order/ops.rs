//! The backend trait of orders, where kernels make them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
#[cfg(feature = "fusion")]
use burn::tensor::DType;

/// Lists that were sorted by the buckets of rounds, i32.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SortedRounds<B: Backend> {
    /// The token at each place, −1 behind the last of a round: `[lists, rounds, room]`.
    pub tokens: IntTensor<B>,
    /// The place of each token in each round, counted through all: `[lists, length, rounds]`.
    pub places: IntTensor<B>,
    /// `token · rounds + round` of the token at each place, negative behind the last: `[lists, rounds, room]`.
    pub choices: IntTensor<B>,
}

/// The top-k of rows, i32.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct TopKLists<B: Backend> {
    /// Their columns, ascending: `[groups, rows, most]`.
    pub columns: IntTensor<B>,
    /// Of each number `row · most` and its place in the row's list, or −1: `[groups, rows, columns]`.
    pub places: IntTensor<B>,
}

/// Rows that means attract, i32.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct TopKPerCentroidLists<B: Backend> {
    /// The rows of each mean, ascending: `[batch, heads, means, most]`.
    pub rows: IntTensor<B>,
    /// Of each mean and row `mean · most` and its place in the mean's list, or −1: `[batch, heads, means, length]`.
    pub places: IntTensor<B>,
    /// The nearest mean of each row, counted through those of all heads: `[batch, heads, length]`.
    pub nearest: IntTensor<B>,
}

/// Sorts and lists as backend operations, on devices that have kernels alone, of i32 tensors. Elsewhere the functions that use them use Burn's operations.
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait OrderOps: Backend {
    /// Lists `[lists, rounds, length]` sorted by bucket in each round, into rounds of `room` places.
    #[fusion(meta = meta::sorted)]
    fn counting_argsort_rounds(
        buckets: IntTensor<Self>,
        count: usize,
        room: usize,
    ) -> SortedRounds<Self>;

    /// The first of the largest of `[x R; −x R]` of rows `[batch, heads, length, dim]` and each rotation of `[rounds, dim, half]`:
    /// `[batch, heads, rounds, length]`.
    #[fusion(dtype = DType::I32, shape = [x[0], x[1], rotations[0], x[2]].into())]
    fn lsh_hash(x: FloatTensor<Self>, rotations: FloatTensor<Self>) -> IntTensor<Self>;

    /// The order of such rows by their buckets in each round, in rounds of `room` places, of `batch · heads` lists.
    #[fusion(meta = meta::sorted_hashes)]
    fn lsh_argsort(
        x: FloatTensor<Self>,
        rotations: FloatTensor<Self>,
        room: usize,
    ) -> SortedRounds<Self>;

    /// The `most` highest of each row of `[groups, rows, columns]`, in f32.
    #[fusion(meta = meta::highest)]
    fn topk_rows(numbers: FloatTensor<Self>, most: usize) -> TopKLists<Self>;

    /// The `most` rows of `[batch, heads, length, width]` most similar to each mean of `[heads, means, width]` in f32, and the nearest mean of each.
    #[fusion(meta = meta::attracted)]
    fn topk_per_centroid(
        x: FloatTensor<Self>,
        means: FloatTensor<Self>,
        most: usize,
    ) -> TopKPerCentroidLists<Self>;

    /// Of each column of `[batch, heads, rows, columns]` the row of its highest number, counted through the rows of all heads: `[batch, heads, columns]`.
    #[fusion(dtype = DType::I32, shape = [numbers[0], numbers[1], numbers[3]].into())]
    fn argmax_rows(numbers: FloatTensor<Self>) -> IntTensor<Self>;
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;

    pub fn sorted(buckets: &TensorSpec, _count: &usize, room: &usize) -> SortedRoundsMetadata {
        let [lists, rounds, length] = buckets.shape.dims::<3>();
        let by_place = TensorSpec::new([lists, rounds, *room].into(), DType::I32);
        SortedRoundsMetadata {
            tokens: by_place.clone(),
            places: TensorSpec::new([lists, length, rounds].into(), DType::I32),
            choices: by_place,
        }
    }

    pub fn sorted_hashes(
        x: &TensorSpec,
        rotations: &TensorSpec,
        room: &usize,
    ) -> SortedRoundsMetadata {
        let [batch, heads, length, _] = x.shape.dims::<4>();
        let shape = [batch * heads, rotations.shape[0], length];
        let buckets = TensorSpec::new(shape.into(), DType::I32);
        sorted(&buckets, &0, room)
    }

    pub fn highest(numbers: &TensorSpec, most: &usize) -> TopKListsMetadata {
        let [groups, rows, _] = numbers.shape.dims::<3>();
        TopKListsMetadata {
            columns: TensorSpec::new([groups, rows, *most].into(), DType::I32),
            places: TensorSpec::new(numbers.shape.clone(), DType::I32),
        }
    }

    pub fn attracted(
        x: &TensorSpec,
        means: &TensorSpec,
        most: &usize,
    ) -> TopKPerCentroidListsMetadata {
        let [batch, heads, length, _] = x.shape.dims::<4>();
        let of_mean = |count: usize| {
            let shape = [batch, heads, means.shape[1], count];
            TensorSpec::new(shape.into(), DType::I32)
        };
        TopKPerCentroidListsMetadata {
            rows: of_mean(*most),
            places: of_mean(length),
            nearest: TensorSpec::new([batch, heads, length].into(), DType::I32),
        }
    }
}
