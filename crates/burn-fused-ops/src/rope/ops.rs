//! The backend trait of rotary position embedding.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::rope::reference;
use crate::rope::values::{RopeCall, RopeInputs};
use burn_blocksparse::reference_backends;

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
