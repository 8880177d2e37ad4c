//! The backend trait of feed-forward networks.

use burn::backend::backend_extension;
use burn::backend::tensor::FloatTensor;

use crate::activation::ops::ActivationOps;
use crate::activation::values::ActivationGrads;
use crate::linear::ops::LinearOps;
use crate::mlp::steps;
use crate::mlp::values::{
    MlpActive, MlpCall, MlpInnerInputs, MlpInputs, MlpOuterSaved, MlpOuterTask,
};

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

    /// `f(x · W₁ + b)`, and with `keep` what came into it.
    #[fusion(meta = meta::inner)]
    fn mlp_inner(
        #[extension_type] inputs: MlpInnerInputs<Self>,
        call: MlpCall,
        keep: bool,
    ) -> MlpActive<Self> {
        steps::inner::<Self>(inputs, call, keep)
    }

    /// Gradients by what comes into the activation and by the bias, and the activation again.
    #[fusion(meta = meta::outer_backward)]
    fn mlp_outer_backward(
        #[extension_type] saved: MlpOuterSaved<Self>,
        task: MlpOuterTask,
    ) -> ActivationGrads<Self> {
        steps::outer_backward::<Self>(saved, task)
    }
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::activation::values::ActivationGradsMetadata;
    use crate::linear::products::with_width;
    use crate::mlp::values::{
        MlpActiveMetadata, MlpInnerInputsMetadata, MlpInputsMetadata, MlpOuterSavedMetadata,
    };
    use burn_blocksparse::internal::values::OptFloatMetadata;

    fn maybe(spec: Option<TensorSpec>) -> OptFloatMetadata {
        match spec {
            Some(spec) => OptFloatMetadata::Some(spec),
            None => OptFloatMetadata::None,
        }
    }

    pub fn inner(
        inputs: &MlpInnerInputsMetadata,
        call: &MlpCall,
        keep: &bool,
    ) -> MlpActiveMetadata {
        let dtype = call.dtype.into();
        let (x, weight) = (&inputs.x, &inputs.inner);
        let hidden = || TensorSpec::new(with_width(&x.shape, weight.shape[1]), dtype);
        let changed = |tensor: &TensorSpec| {
            (tensor.dtype != dtype).then(|| TensorSpec::new(tensor.shape.clone(), dtype))
        };
        MlpActiveMetadata {
            active: hidden(),
            hidden: maybe(keep.then(hidden)),
            x: maybe(changed(x)),
            inner: maybe(changed(weight)),
        }
    }

    pub fn outer_backward(
        saved: &MlpOuterSavedMetadata,
        task: &MlpOuterTask,
    ) -> ActivationGradsMetadata {
        let hidden = &saved.hidden;
        let width = hidden.shape[hidden.shape.num_dims() - 1];
        let bias = |dtype: burn::tensor::FloatDType| TensorSpec::new([width].into(), dtype.into());
        ActivationGradsMetadata {
            x: maybe(Some(hidden.clone())),
            bias: maybe(task.bias.map(bias)),
            y: maybe(task.active.then(|| hidden.clone())),
        }
    }

    pub fn forward(inputs: &MlpInputsMetadata, call: &MlpCall) -> TensorSpec {
        let shape = with_width(&inputs.x.shape, inputs.outer.shape[1]);
        TensorSpec::new(shape, call.dtype.into())
    }
}
