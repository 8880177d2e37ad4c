//! The backend trait of feed-forward networks.

use burn::backend::backend_extension;
use burn::backend::tensor::FloatTensor;

use super::{ActivationOps, LinearOps};
use crate::mlp::steps;
use crate::mlp::values::{MlpCall, MlpInputs};

/// Feed-forward networks as a backend operation, made of products and activations. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait MlpOps: LinearOps + ActivationOps {
    /// `f(x · W₁ + b) · W₂`.
    #[fusion(meta = meta::forward)]
    fn mlp(#[extension_type] inputs: MlpInputs<Self>, call: MlpCall) -> FloatTensor<Self> {
        steps::forward::<Self>(inputs, call, false).out
    }
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::linear::products::with_width;
    use crate::mlp::values::MlpInputsMetadata;

    pub fn forward(inputs: &MlpInputsMetadata, call: &MlpCall) -> TensorSpec {
        let shape = with_width(&inputs.x.shape, inputs.outer.shape[1]);
        TensorSpec::new(shape, call.dtype.into())
    }
}
