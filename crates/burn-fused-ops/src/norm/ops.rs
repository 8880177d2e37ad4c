//! The backend trait of residual norms and of dropout.

use blocksparse::ElementDropout;

use crate::norm::reference;
use crate::norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
use burn_blocksparse::internal::prelude::*;

/// Residual norms and dropout as backend operations. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait NormOps: Backend {
    /// Forward pass of the residual norm.
    #[fusion(meta = meta::forward)]
    fn add_norm(#[extension_type] inputs: NormInputs<Self>, call: NormCall) -> NormOutput<Self> {
        reference::forward::<Self>(inputs, &call)
    }

    /// Backward pass of the residual norm.
    #[fusion(meta = meta::backward)]
    fn residual_norm_backward(
        #[extension_type] saved: NormSaved<Self>,
        #[extension_type] grads: NormOutputGrads<Self>,
        call: NormBackwardCall,
    ) -> NormGrads<Self> {
        reference::backward::<Self>(saved, grads, &call)
    }

    /// Applies dropout: `m ∘ x` with a probability above 0. The gradient with respect to `x` is the same operation on the output's gradient.
    #[fusion(dtype = x, shape = x)]
    fn stream_dropout(x: FloatTensor<Self>, dropout: ElementDropout) -> FloatTensor<Self> {
        reference::dropout::<Self>(x, dropout)
    }
}

reference_backends!(NormOps);

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use crate::norm::values::{
        NormInputsMetadata, NormOutputGradsMetadata, NormOutputMetadata, NormSavedMetadata,
    };

    pub fn forward(inputs: &NormInputsMetadata, call: &NormCall) -> NormOutputMetadata {
        let shape = &inputs.stream.shape;
        let normed = (call.norm).map(|_| TensorSpec::new(shape.clone(), call.dtype.into()));
        let [rows, _] = matrix(shape);
        let sums = sums_of(inputs.stream.dtype);
        let rstd = (call.norm).map(|_| TensorSpec::new([rows].into(), sums));
        NormOutputMetadata {
            stream: (inputs.branch.as_ref())
                .map(|_| inputs.stream.clone())
                .into(),
            normed: normed.clone().into(),
            xhat: normed.filter(|_| call.keep).into(),
            rstd: rstd.filter(|_| call.keep).into(),
        }
    }

    pub fn backward(
        _saved: &NormSavedMetadata,
        grads: &NormOutputGradsMetadata,
        call: &NormBackwardCall,
    ) -> NormInputsMetadata {
        let grad = grads.stream.as_ref().or(grads.normed.as_ref());
        let shape = &grad.expect("a gradient by an output").shape;
        let [_, width] = matrix(shape);
        let matrix = |dtype: FloatDType| TensorSpec::new(shape.clone(), dtype.into());
        let row = |dtype: FloatDType| TensorSpec::new([width].into(), dtype.into());
        NormInputsMetadata {
            stream: matrix(call.stream),
            branch: call.branch.map(matrix).into(),
            bias: call.bias.map(row).into(),
            gamma: call.gamma.map(row).into(),
            beta: call.beta.map(row).into(),
        }
    }
}
