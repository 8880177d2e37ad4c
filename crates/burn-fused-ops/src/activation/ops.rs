//! The backend trait of activations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::activation::reference;
use crate::activation::values::{
    Activation, ActivationGrads, ActivationInputs, ActivationSaved, ActivationTask,
};

/// A bias and an activation as a backend operation. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait ActivationOps: Backend {
    /// `f(x + bias)` in x's dtype.
    #[fusion(meta = meta::forward)]
    fn bias_activation(
        #[extension_type] inputs: ActivationInputs<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        reference::forward::<Self>(inputs, activation)
    }

    /// The backward pass: those gradients that `task` wants.
    #[fusion(meta = meta::backward)]
    fn bias_activation_backward(
        #[extension_type] saved: ActivationSaved<Self>,
        activation: Activation,
        task: ActivationTask,
    ) -> ActivationGrads<Self> {
        reference::backward::<Self>(saved, activation, task)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::activation::values::{
        ActivationGradsMetadata, ActivationInputsMetadata, ActivationSavedMetadata,
    };
    use burn_blocksparse::internal::values::OptFloatMetadata;

    pub fn forward(inputs: &ActivationInputsMetadata, _activation: &Activation) -> TensorSpec {
        inputs.x.clone()
    }

    pub fn backward(
        saved: &ActivationSavedMetadata,
        _activation: &Activation,
        task: &ActivationTask,
    ) -> ActivationGradsMetadata {
        let shape = &saved.grad.shape;
        let width = shape[shape.num_dims() - 1];
        ActivationGradsMetadata {
            x: match task.x {
                true => OptFloatMetadata::Some(saved.grad.clone()),
                false => OptFloatMetadata::None,
            },
            bias: match task.bias {
                Some(dtype) => {
                    OptFloatMetadata::Some(TensorSpec::new([width].into(), dtype.into()))
                }
                None => OptFloatMetadata::None,
            },
            y: match task.y {
                true => OptFloatMetadata::Some(saved.grad.clone()),
                false => OptFloatMetadata::None,
            },
        }
    }
}
