//! The backend trait of queries that list what they see.

// Without autodiff and without a backend nobody goes backward.
#![cfg_attr(not(feature = "autodiff"), allow(dead_code))]

use burn::backend::{Backend, backend_extension};

use crate::selection::token_sparse::reference;
use crate::selection::token_sparse::values::{
    TokenSparseCall, TokenSparseGrads, TokenSparseInputs, TokenSparseOutput, TokenSparseSaved,
};
use burn_blocksparse::internal::values::OutputGrads;
use burn_blocksparse::reference_backends;

/// Attention over lists as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait TokenSparseOps: Backend {
    /// The forward pass.
    #[fusion(meta = meta::forward)]
    fn token_sparse_attention(
        #[extension_type] inputs: TokenSparseInputs<Self>,
        call: TokenSparseCall,
    ) -> TokenSparseOutput<Self> {
        reference::forward::<Self>(inputs, &call)
    }

    /// The backward pass: gradients of a loss whose gradients with respect to the outputs are `grads`.
    #[fusion(meta = meta::backward)]
    fn token_sparse_attention_backward(
        #[extension_type] saved: TokenSparseSaved<Self>,
        #[extension_type] grads: OutputGrads<Self>,
        call: TokenSparseCall,
    ) -> TokenSparseGrads<Self> {
        reference::backward::<Self>(saved, grads, &call)
    }
}

reference_backends!(TokenSparseOps);

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::selection::token_sparse::values::{
        TokenSparseGradsMetadata, TokenSparseInputsMetadata, TokenSparseOutputMetadata,
        TokenSparseSavedMetadata,
    };
    use burn_blocksparse::internal::dtype::accumulate_in;
    use burn_blocksparse::internal::values::OutputGradsMetadata;

    pub fn forward(
        inputs: &TokenSparseInputsMetadata,
        _call: &TokenSparseCall,
    ) -> TokenSparseOutputMetadata {
        let [batch, heads, seq_q, _] = inputs.q.shape.dims::<4>();
        let value_dim = inputs.v.shape[3];
        let sums = accumulate_in(inputs.q.dtype.into()).into();
        TokenSparseOutputMetadata {
            out: TensorSpec::new([batch, heads, seq_q, value_dim].into(), inputs.q.dtype),
            lse: TensorSpec::new([batch, heads, seq_q].into(), sums),
        }
    }

    pub fn backward(
        saved: &TokenSparseSavedMetadata,
        _grads: &OutputGradsMetadata,
        _call: &TokenSparseCall,
    ) -> TokenSparseGradsMetadata {
        TokenSparseGradsMetadata {
            q: saved.inputs.q.clone(),
            k: saved.inputs.k.clone(),
            v: saved.inputs.v.clone(),
        }
    }
}
