//! Balanced clusters: to each mean the same number of tokens, those most similar to it.

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor};
use burn_blocksparse::internal::{gather_qkv, gather_rows, runs_kernels, segment_mean};
use burn_sparse_select::internal::{topk_per_centroid, topk_rows};

use super::buckets::positions_sorted;
use super::{in_dtype, ones, unit};
use crate::TransformerError;
use crate::arange::arange;

/// Similarities are compared as whole numbers: in steps of 2⁻²⁹ of the largest of their mean.
const STEPS: f32 = (1 << 29) as f32;
/// That of NaN, below all others.
const LOWEST: i32 = -(1 << 30);

/// Numbers of a gathered tensor at a time, at most, unless one cluster has more.
const NUMBERS: usize = 1 << 25;

/// Which tokens are in which cluster. All are i32 tensors on the device, without autodiff.
#[derive(Clone, Debug)]
pub(super) struct Clusters {
    /// By cluster, ascending: `[batch, heads, clusters, width]`.
    pub tokens: Tensor<4, Int>,
    /// The place of each token in each cluster, `cluster · width +` its number in it, or −1: `[batch, heads, length, clusters]`.
    places: Tensor<4, Int>,
}

impl Clusters {
    /// The `width` tokens most similar to each mean, of equally similar ones the earlier; NaN is the lowest similarity. `similarities` is
    /// `[batch, heads, clusters, length]`, without autodiff, and `width` at most the length.
    ///
    /// Where kernels run, nothing is sorted or read back.
    pub fn new(similarities: Tensor<4>, width: usize) -> Result<Self, TransformerError> {
        let [batch, heads, clusters, length] = similarities.dims();
        // Kernels compare in f32.
        if similarities.dtype() != DType::F64 {
            let rows = similarities.clone();
            let rows = rows.reshape([batch * heads, clusters, length]);
            if let Some(found) = topk_rows(rows, width)? {
                let places = found.places.reshape([batch, heads, clusters, length]);
                return Ok(Self {
                    tokens: found.columns.reshape([batch, heads, clusters, width]),
                    // Kernels read it as it is.
                    places: places.swap_dims(2, 3),
                });
            }
        }
        Ok(Self::by_sort(similarities, width))
    }

    /// [`Self::new`] by the similarities of vectors `[batch, heads, length, dim]`, which are made as long as 1, to means `[heads, clusters, dim]`, and the nearest
    /// mean of each, as [`nearest`](super::means::nearest) gives it. `None` where kernels do not.
    pub fn by_kernels(
        x: Tensor<4>,
        means: Tensor<3>,
        width: usize,
    ) -> Result<Option<(Self, Tensor<3, Int>)>, TransformerError> {
        Ok(topk_per_centroid(x, means, width)?.map(|found| {
            let clusters = Self {
                tokens: found.rows,
                // Kernels read it as it is.
                places: found.places.swap_dims(2, 3),
            };
            (clusters, found.nearest)
        }))
    }

    fn by_sort(similarities: Tensor<4>, width: usize) -> Self {
        let [batch, heads, clusters, length] = similarities.dims();
        let device = similarities.device();
        let dims = [batch, heads, clusters, length];
        let keys = keys(similarities);
        let tokens = positions_sorted(keys.neg()).narrow(3, 0, width).sort(3);
        let numbers = arange(clusters * width, &device).reshape([1, 1, clusters, width]);
        let numbers = numbers.expand([batch, heads, clusters, width]);
        let places = Tensor::full(dims, -1, (&device, DType::I32));
        let places = places.scatter(3, tokens.clone(), numbers + 1, IndexingUpdateOp::Add);
        Self {
            tokens,
            places: places.swap_dims(2, 3),
        }
    }

    /// Clusters that are gathered together, so that no tensor on the way is large. Kernels have none on the way.
    fn together(&self, dim: usize) -> usize {
        let [batch, heads, length, clusters] = self.places.dims();
        if runs_kernels(&self.tokens.device()) {
            return clusters;
        }
        let of_one = (batch * heads * length * dim).max(1);
        (NUMBERS / of_one).clamp(1, clusters)
    }

    /// Places among those of clusters `from..to`, or −1: `[batch, heads, length, to − from]`.
    fn places_within(&self, from: usize, to: usize) -> Tensor<4, Int> {
        let [.., width] = self.tokens.dims();
        let places = self.places.clone().slice_dim(3, from..to);
        (places - (from * width) as i32).clamp_min(-1)
    }

    /// The rows of `[batch, heads, length, dim]` at all places: `[batch, heads, clusters · width, dim]`.
    pub fn take(&self, x: Tensor<4>) -> Result<Tensor<4>, TransformerError> {
        let [batch, heads, clusters, width] = self.tokens.dims();
        let together = self.together(x.dims()[3]);
        let mut parts = Vec::new();
        for from in (0..clusters).step_by(together) {
            let to = (from + together).min(clusters);
            let index = self.tokens.clone().slice_dim(2, from..to);
            let index = index.reshape([batch, heads, (to - from) * width]);
            let users = self.places_within(from, to);
            parts.push(gather_rows(x.clone(), index, users)?);
        }
        Ok(match parts.len() {
            1 => parts.remove(0),
            _ => Tensor::cat(parts, 2),
        })
    }

    /// The token at each place: `[batch, heads, clusters · width]`.
    pub fn index(&self) -> Tensor<3, Int> {
        let [batch, heads, clusters, width] = self.tokens.dims();
        let tokens = self.tokens.clone();
        tokens.reshape([batch, heads, clusters * width])
    }

    /// The rows of queries at all places, keys that are these made as long as 1, and the rows of values, of one dtype.
    pub fn keyed(
        &self,
        query: Tensor<4>,
        value: Tensor<4>,
    ) -> Result<[Tensor<4>; 3], TransformerError> {
        if runs_kernels(&self.tokens.device()) {
            return Ok(gather_qkv(query, value, self.index(), self.places.clone())?);
        }
        let ([.., head_dim], [.., value_dim]) = (query.dims(), value.dims());
        // One gather for both.
        let both = self.take(Tensor::cat(vec![query, value], 3))?;
        let query = both.clone().slice_dim(3, 0..head_dim);
        let value = both.slice_dim(3, head_dim..head_dim + value_dim);
        let key = in_dtype(unit(query.clone()), query.dtype());
        Ok([query, key, value])
    }

    /// The mean of what places have of each token, and 0 of tokens in no cluster: `[batch, heads, length, dim]`.
    pub fn mean(&self, x: Tensor<4>) -> Result<Tensor<4>, TransformerError> {
        let [batch, heads, clusters, width] = self.tokens.dims();
        let [_, _, length, _] = self.places.dims();
        let [.., dim] = x.dims();
        let device = self.tokens.device();
        if runs_kernels(&device) {
            return Ok(segment_mean(x, self.index(), self.places.clone())?);
        }
        let counts = ones(self.places.clone().greater_equal_elem(0)).sum_dim(3);
        let counts = counts.clamp_min(1).float().cast(x.dtype());
        let counts = counts.expand([batch, heads, length, dim]);
        let together = self.together(dim);
        let mut sum: Option<Tensor<4>> = None;
        for from in (0..clusters).step_by(together) {
            let count = together.min(clusters - from);
            let part = x.clone().slice_dim(2, from * width..(from + count) * width);
            let index = self.places_within(from, from + count);
            let index = index.reshape([batch, heads, length * count]);
            // Each place is used once, by its token's entry for its cluster.
            let tokens = self.tokens.clone().slice_dim(2, from..from + count);
            let dims = [batch, heads, count, width];
            let number = arange(count, &device).reshape([1, 1, count, 1]);
            let users = tokens.mul_scalar(count as i32) + number.expand(dims);
            let users = users.reshape([batch, heads, count * width, 1]);
            let rows = gather_rows(part, index, users)?;
            let rows = rows.reshape([batch, heads, length, count, dim]);
            let rows = rows.sum_dim(3).reshape([batch, heads, length, dim]);
            sum = Some(match sum {
                Some(sum) => sum + rows,
                None => rows,
            });
        }
        let sum = sum.expect("at least one cluster");
        Ok(sum / counts)
    }
}

/// Similarities as whole numbers in the same order, `[batch, heads, clusters, length]`.
fn keys(similarities: Tensor<4>) -> Tensor<4, Int> {
    let dims = similarities.dims();
    let unknown = similarities.clone().is_nan();
    let largest = (similarities.clone().abs().mask_fill(unknown, 0.0)).max_dim(3);
    let shares = similarities / largest.expand(dims);
    let nan = shares.clone().is_nan();
    let keys = (shares.mask_fill(nan.clone(), 0.0) * STEPS).round().int();
    keys.cast(DType::I32).mask_fill(nan, LOWEST)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    /// By a sort.
    fn expected(similarities: &[f32], width: usize) -> Vec<i32> {
        let mut order: Vec<usize> = (0..similarities.len()).collect();
        let number = |at: usize| match similarities[at].is_nan() {
            true => f32::NEG_INFINITY,
            false => similarities[at],
        };
        order.sort_by(|&a, &b| number(b).total_cmp(&number(a)).then(a.cmp(&b)));
        let mut first: Vec<i32> = order[..width].iter().map(|&at| at as i32).collect();
        first.sort_unstable();
        first
    }

    #[test]
    fn clusters_are_the_first_of_a_sort() {
        let device = Device::flex();
        let [batch, heads, clusters, length] = [2, 3, 4, 150];
        let count = batch * heads * clusters * length;
        let numbers = |i: usize| ((i * i * 31 + i * 17 + 5) % 1009) as f32 / 504.0 - 1.0;
        let mut similarities: Vec<f32> = (0..count).map(numbers).collect();
        // A row of ties, one of zeros, and some that are no number.
        (0..length).for_each(|at| similarities[at] = (at % 3) as f32 - 1.0);
        similarities[length..2 * length].fill(0.0);
        for at in [3 * length, 3 * length + 7, 4 * length - 1] {
            similarities[at] = f32::NAN;
        }
        for width in [1, 7, 64, 65, 149, 150] {
            let data = TensorData::new(similarities.clone(), [batch, heads, clusters, length]);
            let found = Clusters::new(Tensor::from_data(data, &device), width).unwrap();
            let tokens: Vec<i32> = found.tokens.clone().into_data().iter().collect();
            let places: Vec<i32> = found.places.clone().into_data().iter().collect();
            for (row, similarities) in similarities.chunks(length).enumerate() {
                let got = &tokens[row * width..][..width];
                assert_eq!(got, expected(similarities, width), "{row}, {width}");
                let (group, cluster) = (row / clusters, row % clusters);
                for token in 0..length {
                    let place = places[(group * length + token) * clusters + cluster];
                    let rank = got.iter().position(|&at| at as usize == token);
                    let rank = rank.map_or(-1, |rank| (cluster * width + rank) as i32);
                    assert_eq!(place, rank);
                }
            }
        }
    }
}
