//! The backend trait of rotary position embedding, and what crosses it.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType, backend_extension};
use burn::tensor::FloatDType;

use crate::rope::reference;
use burn_blocksparse::internal::values::OptInt;
use burn_blocksparse::reference_backends;

/// What is turned by what.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct RopeInputs<B: Backend> {
    /// `[batch, heads, seq, width]`
    pub x: FloatTensor<B>,
    /// `[context, width, 2]`: cosine and sine, for both channels of a pair.
    pub table: FloatTensor<B>,
    /// `[batch · seq]`: rows of the table. None: those from the call's first on.
    #[extension_type]
    pub places: OptInt<B>,
}

/// How it is turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RopeCall {
    /// Position of the first row, where there are no places.
    pub first: usize,
    /// Whether the other way round.
    pub back: bool,
    /// Of the result.
    pub dtype: FloatDType,
}

/// Rotary position embedding as a backend operation. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait RopeOps: Backend {
    /// x, turned, in the call's dtype.
    #[fusion(dtype = call.dtype.into(), shape = inputs.x.shape.clone())]
    fn rope(#[extension_type] inputs: RopeInputs<Self>, call: RopeCall) -> FloatTensor<Self> {
        reference::rope::<Self>(inputs, call)
    }
}

reference_backends!(RopeOps);
