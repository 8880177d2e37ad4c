//! The backend trait of products with block-sparse weights.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::linear::products::Primitives;
#[cfg(feature = "fusion")]
use crate::linear::products::with_width;
use crate::sparse_linear::products;
use crate::sparse_linear::products::Gathered;
use crate::sparse_linear::values::{
    SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
use burn_blocksparse::reference_backends;

/// Products with block-sparse weights as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait BlockSparseLinearOps: Backend {
    /// `x · W` of factors that are rounded to the call's dtype, in it.
    #[fusion(meta = meta::forward)]
    fn block_sparse_linear_forward(
        #[extension_type] inputs: SparseLinearInputs<Self>,
        call: SparseLinearCall,
    ) -> SparseLinearOutput<Self> {
        products::forward::<Self, Gathered<Primitives>>(inputs, call)
    }

    /// `dy · Wᵀ`, `[.., inputs]`, of the weight as it was multiplied.
    #[fusion(dtype = call.dtype.into(), shape = with_width(&saved.grad.shape, call.layout.inputs()))]
    fn block_sparse_linear_backward_input(
        #[extension_type] saved: SparseLinearSaved<Self>,
        call: SparseLinearCall,
    ) -> FloatTensor<Self> {
        products::backward_input::<Self, Gathered<Primitives>>(saved, call)
    }

    /// `xᵀ · dy` of the kept blocks, `[blocks, block, block]`, of x as it was multiplied.
    #[fusion(dtype = call.dtype.into(), shape = call.layout.shape().into())]
    fn block_sparse_linear_backward_weight(
        #[extension_type] saved: SparseLinearSaved<Self>,
        call: SparseLinearCall,
    ) -> FloatTensor<Self> {
        products::backward_weight::<Self, Gathered<Primitives>>(saved, call)
    }
}

reference_backends!(BlockSparseLinearOps);

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::sparse_linear::values::{SparseLinearInputsMetadata, SparseLinearOutputMetadata};

    pub fn forward(
        inputs: &SparseLinearInputsMetadata,
        call: &SparseLinearCall,
    ) -> SparseLinearOutputMetadata {
        let dtype = call.dtype.into();
        let rounded = |tensor: &TensorSpec| {
            let cast = || TensorSpec::new(tensor.shape.clone(), dtype);
            (tensor.dtype != dtype).then(cast).into()
        };
        let shape = with_width(&inputs.x.shape, call.layout.outputs());
        SparseLinearOutputMetadata {
            out: TensorSpec::new(shape, dtype),
            x: rounded(&inputs.x),
            weight: rounded(&inputs.weight),
        }
    }
}
