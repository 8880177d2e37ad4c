//! The backend trait of rotary position embedding.

use crate::rope::reference;
#[cfg(feature = "fusion")]
use crate::rope::values::TurnedRowsMetadata;
use crate::rope::values::{RopeCall, RopeInputs, TurnedRows};
use burn_blocksparse::internal::prelude::*;

/// Rotary position embedding as a backend operation. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait RopeOps: Backend {
    /// Rotates the rows and returns them in the call's dtype.
    #[fusion(meta = |inputs, call| TurnedRowsMetadata {
        x: TensorSpec::new(inputs.x.shape.clone(), call.dtype.into()),
        key: inputs.key.cast(call.dtype.into()),
    })]
    fn rope(#[extension_type] inputs: RopeInputs<Self>, call: RopeCall) -> TurnedRows<Self> {
        reference::rope::<Self>(inputs, call)
    }
}

reference_backends!(RopeOps);
