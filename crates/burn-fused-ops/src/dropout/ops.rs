//! The backend trait of dropout.

use blocksparse::ElementDropout;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::norm::reference;

/// Dropout of a tensor as a backend operation. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait DropoutOps: Backend {
    /// `m ∘ x` of a probability above 0. The gradient by `x` is the same of that by the output.
    #[fusion(dtype = x, shape = x)]
    fn stream_dropout(x: FloatTensor<Self>, dropout: ElementDropout) -> FloatTensor<Self> {
        reference::dropout::<Self>(x, dropout)
    }
}
