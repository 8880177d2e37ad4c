//! The backend trait of products with block-sparse weights.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::linear::products::Primitives;
use crate::sparse_linear::products;
use crate::sparse_linear::products::Gathered;
use crate::sparse_linear::values::{
    SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};

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
    #[fusion(meta = meta::backward_input)]
    fn block_sparse_linear_backward_input(
        #[extension_type] saved: SparseLinearSaved<Self>,
        call: SparseLinearCall,
    ) -> FloatTensor<Self> {
        products::backward_input::<Self, Gathered<Primitives>>(saved, call)
    }

    /// `xᵀ · dy` of the kept blocks, `[blocks, block, block]`, of x as it was multiplied.
    #[fusion(meta = meta::backward_weight)]
    fn block_sparse_linear_backward_weight(
        #[extension_type] saved: SparseLinearSaved<Self>,
        call: SparseLinearCall,
    ) -> FloatTensor<Self> {
        products::backward_weight::<Self, Gathered<Primitives>>(saved, call)
    }
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::linear::products::with_width;
    use crate::sparse_linear::values::{
        SparseLinearInputsMetadata, SparseLinearOutputMetadata, SparseLinearSavedMetadata,
    };
    use burn_blocksparse::internal::values::OptFloatMetadata;

    pub fn forward(
        inputs: &SparseLinearInputsMetadata,
        call: &SparseLinearCall,
    ) -> SparseLinearOutputMetadata {
        let dtype = call.dtype.into();
        let rounded = |tensor: &TensorSpec| match tensor.dtype == dtype {
            true => OptFloatMetadata::None,
            false => OptFloatMetadata::Some(TensorSpec::new(tensor.shape.clone(), dtype)),
        };
        let shape = with_width(&inputs.x.shape, call.layout.outputs());
        SparseLinearOutputMetadata {
            out: TensorSpec::new(shape, dtype),
            x: rounded(&inputs.x),
            weight: rounded(&inputs.weight),
        }
    }

    pub fn backward_input(
        saved: &SparseLinearSavedMetadata,
        call: &SparseLinearCall,
    ) -> TensorSpec {
        let shape = with_width(&saved.grad.shape, call.layout.inputs());
        TensorSpec::new(shape, call.dtype.into())
    }

    pub fn backward_weight(
        _saved: &SparseLinearSavedMetadata,
        call: &SparseLinearCall,
    ) -> TensorSpec {
        TensorSpec::new(call.layout.shape().into(), call.dtype.into())
    }
}
