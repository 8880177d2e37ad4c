//! The backend trait of residual norms.

use burn::backend::{Backend, backend_extension};

use crate::norm::reference;
use crate::norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};

/// A residual stream, what is added to it and its norm as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait NormOps: Backend {
    /// The forward pass.
    #[fusion(meta = meta::forward)]
    fn add_norm(#[extension_type] inputs: NormInputs<Self>, call: NormCall) -> NormOutput<Self> {
        reference::forward::<Self>(inputs, &call)
    }

    /// The backward pass.
    #[fusion(meta = meta::backward)]
    fn residual_norm_backward(
        #[extension_type] saved: NormSaved<Self>,
        #[extension_type] grads: NormOutputGrads<Self>,
        call: NormBackwardCall,
    ) -> NormGrads<Self> {
        reference::backward::<Self>(saved, grads, &call)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::FloatDType;

    use super::*;
    use crate::norm::values::{
        NormGradsMetadata, NormInputsMetadata, NormOutputGradsMetadata, NormOutputMetadata,
        NormSavedMetadata,
    };
    use burn_blocksparse::internal::dtype::accumulate_in;
    use burn_blocksparse::internal::values::OptFloatMetadata;

    fn maybe(spec: Option<TensorSpec>) -> OptFloatMetadata {
        spec.map_or(OptFloatMetadata::None, OptFloatMetadata::Some)
    }

    pub fn forward(inputs: &NormInputsMetadata, call: &NormCall) -> NormOutputMetadata {
        let shape = &inputs.stream.shape;
        let has_branch = matches!(inputs.branch, OptFloatMetadata::Some(_));
        let normed = (call.norm).map(|_| TensorSpec::new(shape.clone(), call.dtype.into()));
        let [rows, _] = reference::matrix(shape);
        let sums = accumulate_in(inputs.stream.dtype.into()).into();
        let rstd = (call.norm).map(|_| TensorSpec::new([rows].into(), sums));
        NormOutputMetadata {
            stream: maybe(has_branch.then(|| inputs.stream.clone())),
            normed: maybe(normed.clone()),
            xhat: maybe(normed.filter(|_| call.keep)),
            rstd: maybe(rstd.filter(|_| call.keep)),
        }
    }

    pub fn backward(
        _saved: &NormSavedMetadata,
        grads: &NormOutputGradsMetadata,
        call: &NormBackwardCall,
    ) -> NormGradsMetadata {
        let shape = match (&grads.stream, &grads.normed) {
            (OptFloatMetadata::Some(grad), _) | (_, OptFloatMetadata::Some(grad)) => {
                grad.shape.clone()
            }
            _ => panic!("a gradient by an output"),
        };
        let [_, width] = reference::matrix(&shape);
        let matrix = |dtype: FloatDType| TensorSpec::new(shape.clone(), dtype.into());
        let row = |dtype: FloatDType| TensorSpec::new([width].into(), dtype.into());
        NormGradsMetadata {
            stream: matrix(call.stream),
            branch: maybe(call.branch.map(matrix)),
            bias: maybe(call.bias.map(row)),
            gamma: maybe(call.gamma.map(row)),
            beta: maybe(call.beta.map(row)),
        }
    }
}
