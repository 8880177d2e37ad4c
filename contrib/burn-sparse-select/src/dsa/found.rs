//! The keys that an indexer's loss compares, and a loss with its gradients.

use burn::tensor::Tensor;

use crate::dsa::scores::DsaIndex;
use crate::selection::key_lists::TokenIndices;
use burn_blocksparse::internal::sums::sum_all;

/// Keys over which an indexer's loss compares scores.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum DsaTarget<'a> {
    /// All keys that a query sees, with dense attention: for the indexer's warm-up.
    All,
    /// The selected keys, with their dense attention normalized to sum 1.
    Chosen(&'a TokenIndices),
}

/// A loss and its gradients with respect to the parts of an index, in the dtype of scores and without autodiff.
pub(crate) struct Found {
    pub loss: Tensor<1>,
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub weights: Tensor<3>,
}

impl Found {
    /// Returns the loss as a node of the index's autodiff graph, if there is one.
    pub fn in_graph_of(self, index: &DsaIndex) -> Tensor<1> {
        if !index.q.is_autodiff() {
            return self.loss;
        }
        let dtype = self.loss.dtype();
        let inside = |by: Tensor<4>| like(by, &index.q);
        let by_weights = inside(self.weights.unsqueeze_dim(3));
        let weights = index.weights.clone().unsqueeze_dim::<4>(3);
        // The value of the loss, with the gradient of a function that is linear in the index.
        let linear = sum_all(index.q.clone().cast(dtype) * inside(self.q))
            + sum_all(index.k.clone().cast(dtype) * inside(self.k))
            + sum_all(weights.cast(dtype) * by_weights);
        like(self.loss, &index.q) + (linear.clone() - linear.detach())
    }
}

/// Moves a tensor to the autodiff device of another tensor.
pub(crate) fn like<const D: usize>(x: Tensor<D>, other: &Tensor<4>) -> Tensor<D> {
    let x = x.autodiff();
    match other.gradient_checkpointing_strategy() {
        Some(strategy) => x.with_gradient_checkpointing_strategy(strategy),
        None => x,
    }
}
