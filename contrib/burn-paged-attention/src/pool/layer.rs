//! A layer of a model, as a pool reads it.

use std::ops::Deref;

use burn_sparse_transformer::SparseMultiHeadAttention;

/// What the layer's methods over pages are written for.
#[derive(Clone, Copy)]
pub(super) struct Layer<'a>(pub &'a SparseMultiHeadAttention);

impl Deref for Layer<'_> {
    type Target = SparseMultiHeadAttention;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}
