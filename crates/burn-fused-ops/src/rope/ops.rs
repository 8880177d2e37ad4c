//! The backend trait of rotary position embedding.

use burn::backend::{Backend, backend_extension};

use crate::rope::reference;
use crate::rope::values::{RopeCall, RopeInputs, TurnedRows};
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
    /// The rows, turned, in the call's dtype.
    #[fusion(meta = meta::turned)]
    fn rope(#[extension_type] inputs: RopeInputs<Self>, call: RopeCall) -> TurnedRows<Self> {
        reference::rope::<Self>(inputs, call)
    }
}

reference_backends!(RopeOps);

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use crate::rope::values::{RopeInputsMetadata, TurnedRowsMetadata};
    use burn::backend::fusion::custom::TensorSpec;

    pub fn turned(inputs: &RopeInputsMetadata, call: &RopeCall) -> TurnedRowsMetadata {
        let dtype = call.dtype.into();
        TurnedRowsMetadata {
            x: TensorSpec::new(inputs.x.shape.clone(), dtype),
            key: inputs.key.cast(dtype),
        }
    }
}
