//! Wrapper of a model's layer.

use std::ops::Deref;

use burn_sparse_transformer::SparseMultiHeadAttention;

/// Carries the layer's methods over pages.
#[derive(Clone, Copy)]
pub(super) struct Layer<'a>(pub &'a SparseMultiHeadAttention);

impl Deref for Layer<'_> {
    type Target = SparseMultiHeadAttention;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}
