//! The backend trait of products with block-sparse weights.

#[cfg(feature = "fusion")]
use blocksparse::WeightLayout;

use crate::linear::products::Primitives;
#[cfg(feature = "fusion")]
use crate::linear::products::with_width;
use crate::sparse_linear::products;
use crate::sparse_linear::products::Gathered;
use crate::sparse_linear::values::{
    Pass, SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
use burn_blocksparse::internal::prelude::*;

/// Products with block-sparse weights as backend operations. The public functions check the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait BlockSparseLinearOps: Backend {
    /// Returns `x · W` with factors rounded to the call's dtype, in that dtype.
    #[fusion(meta = meta::forward)]
    fn block_sparse_linear_forward(
        #[extension_type] inputs: SparseLinearInputs<Self>,
        call: SparseLinearCall,
    ) -> SparseLinearOutput<Self> {
        products::forward::<Self, Gathered<Primitives>>(inputs, call)
    }

    /// Returns a gradient: `dy · Wᵀ`, `[.., inputs]`, from the rounded weight; or `xᵀ · dy` of the kept blocks, `[blocks, block, block]`, from the rounded x.
    #[fusion(dtype = call.dtype.into(), shape = of_gradient(&saved.grad.shape, &call.layout, *pass))]
    fn block_sparse_linear_backward(
        #[extension_type] saved: SparseLinearSaved<Self>,
        call: SparseLinearCall,
        pass: Pass,
    ) -> FloatTensor<Self> {
        products::backward::<Self, Gathered<Primitives>>(saved, call, pass)
    }
}

reference_backends!(BlockSparseLinearOps);

#[cfg(feature = "fusion")]
fn of_gradient(grad: &Shape, layout: &WeightLayout, pass: Pass) -> Shape {
    match pass {
        Pass::Weight => layout.shape().into(),
        Pass::Forward | Pass::Input => with_width(grad, layout.inputs()),
    }
}

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
