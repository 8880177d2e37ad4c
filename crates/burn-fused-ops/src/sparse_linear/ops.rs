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

    /// `dy · Wᵀ`, `[.., inputs]`, of the weight as it was multiplied; or `xᵀ · dy` of the kept blocks, `[blocks, block, block]`, of x as it was.
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
