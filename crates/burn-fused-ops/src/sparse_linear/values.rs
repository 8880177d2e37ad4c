//! Values in the signatures of the backend trait of products with block-sparse weights.

use blocksparse::WeightLayout;

use burn_blocksparse::internal::prelude::*;

/// The three products of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// `x · W`: `[rows, inputs]` and `[blocks, block, block]` to `[rows, outputs]`.
    Forward,
    /// `dy · Wᵀ`: `[rows, outputs]` and `[blocks, block, block]` to `[rows, inputs]`.
    Input,
    /// `xᵀ · dy`: `[rows, inputs]` and `[rows, outputs]` to `[blocks, block, block]`.
    Weight,
}

/// Parameters of a product.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SparseLinearCall {
    /// Kept blocks of the weight.
    pub layout: WeightLayout,
    /// Forward: dtype of the factors and of the product. Backward: dtype of the gradient.
    pub dtype: FloatDType,
}

op_values! {
    /// The factors of [`block_sparse_linear`](crate::sparse_linear::block_sparse_linear).
    pub struct SparseLinearInputs {
        /// `[.., inputs]`
        pub x: FloatTensor,
        /// `[blocks, block, block]`
        pub weight: FloatTensor,
    }

    /// Output of the forward pass.
    pub struct SparseLinearOutput {
        /// `[.., outputs]`, in the product's dtype.
        pub out: FloatTensor,
        /// x in the product's dtype, if x has another.
        pub x: OptFloat,
        /// Weight in the product's dtype, if the weight has another.
        pub weight: OptFloat,
    }

    /// Tensors from which a gradient is computed.
    pub struct SparseLinearSaved {
        /// The other factor, rounded: the weight `[blocks, block, block]` for the gradient with respect to x, x `[.., inputs]` for that with respect to the
        /// weight.
        pub factor: FloatTensor,
        /// Gradient with respect to the output, `[.., outputs]`.
        pub grad: FloatTensor,
    }
}
