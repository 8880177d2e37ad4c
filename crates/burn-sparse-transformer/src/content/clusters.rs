//! Balanced clusters: each mean gets the same number of tokens, the ones most similar to it.

use burn::tensor::{Int, Tensor};
use burn_blocksparse::internal::{gather_rows, runs_kernels, segment_sum};
use burn_sparse_select::internal::topk_rows;

use super::{in_dtype, ones, widened};
use crate::error::Result;

/// Most elements of a gathered tensor, unless a single cluster has more.
const NUMBERS: usize = 1 << 25;

/// Assignment of tokens to clusters, as i32 tensors on the device, without autodiff.
#[derive(Clone, Debug)]
pub(super) struct Clusters {
    /// Tokens of each cluster, ascending: `[batch, heads, clusters, width]`.
    pub tokens: Tensor<4, Int>,
    /// Slot of each token in each cluster, `cluster · width +` its index in the cluster, or −1: `[batch, heads, length, clusters]`.
    places: Tensor<4, Int>,
}

impl Clusters {
    /// Assigns to each mean the `width` most similar tokens, the earlier ones on ties; NaN is the lowest similarity. `similarities` is
    /// `[batch, heads, clusters, length]`, without autodiff, and `width` at most the length.
    ///
    /// On devices with kernels nothing is sorted or read back.
    pub fn new(similarities: Tensor<4>, width: usize) -> Result<Self> {
        let dims @ [batch, heads, clusters, length] = similarities.dims();
        let found = topk_rows(
            similarities.reshape([batch * heads, clusters, length]),
            width,
        )?;
        Ok(Self {
            tokens: found.columns.reshape([batch, heads, clusters, width]),
            places: found.places.reshape(dims).swap_dims(2, 3),
        })
    }

    /// Returns the number of clusters to gather at once, so that no intermediate tensor is large. Kernels have no intermediates.
    fn together(&self, dim: usize) -> usize {
        let [batch, heads, length, clusters] = self.places.dims();
        if runs_kernels(&self.tokens.device()) {
            return clusters;
        }
        let of_one = (batch * heads * length * dim).max(1);
        (NUMBERS / of_one).clamp(1, clusters)
    }

    /// Iterates over ranges of clusters to gather at once: the range, the token of each of its slots, `[batch, heads, (to − from) · width]`, and the slots of
    /// each token in it, or −1: `[batch, heads, length, to − from]`.
    fn parts(
        &self,
        dim: usize,
    ) -> impl Iterator<Item = ([usize; 2], Tensor<3, Int>, Tensor<4, Int>)> {
        let [batch, heads, clusters, width] = self.tokens.dims();
        let together = self.together(dim);
        (0..clusters).step_by(together).map(move |from| {
            let to = (from + together).min(clusters);
            if to - from == clusters {
                return ([from, to], self.index(), self.places.clone());
            }
            let index = self.tokens.clone().slice_dim(2, from..to);
            let index = index.reshape([batch, heads, (to - from) * width]);
            let places = self.places.clone().slice_dim(3, from..to);
            let users = (places - (from * width) as i32).clamp_min(-1);
            ([from, to], index, users)
        })
    }

    /// Gathers the rows of `[batch, heads, length, dim]` into all slots: `[batch, heads, clusters · width, dim]`.
    pub fn take(&self, x: Tensor<4>) -> Result<Tensor<4>> {
        let mut parts = Vec::new();
        for (_, index, users) in self.parts(x.dims()[3]) {
            parts.push(gather_rows(x.clone(), index, users)?);
        }
        Ok(match parts.len() {
            1 => parts.remove(0),
            _ => Tensor::cat(parts, 2),
        })
    }

    /// Returns the token of each slot: `[batch, heads, clusters · width]`.
    pub fn index(&self) -> Tensor<3, Int> {
        let [batch, heads, clusters, width] = self.tokens.dims();
        let tokens = self.tokens.clone();
        tokens.reshape([batch, heads, clusters * width])
    }

    /// Averages the slots of each token, with 0 for tokens in no cluster: `[batch, heads, length, dim]`.
    pub fn mean(&self, x: Tensor<4>) -> Result<Tensor<4>> {
        let [_, _, clusters, width] = self.tokens.dims();
        let [.., dim] = x.dims();
        let dtype = x.dtype();
        let x = widened(x);
        let mut sum: Option<Tensor<4>> = None;
        for ([from, to], index, users) in self.parts(dim) {
            let part = match to - from == clusters {
                true => x.clone(),
                false => x.clone().slice_dim(2, from * width..to * width),
            };
            let rows = segment_sum(part, index, users)?;
            sum = (sum.into_iter().chain([rows])).reduce(|sum, rows| sum + rows);
        }
        let sum = sum.expect("at least one cluster");
        // Reduced in memory order: reducing the transposed tensor takes three times as long.
        let places = self.places.clone().swap_dims(2, 3);
        let counts = ones(places.greater_equal_elem(0)).sum_dim(2);
        let counts = counts.clamp_min(1).float().cast(sum.dtype());
        let counts = counts.swap_dims(2, 3).expand(sum.dims());
        Ok(in_dtype(sum / counts, dtype))
    }
}
