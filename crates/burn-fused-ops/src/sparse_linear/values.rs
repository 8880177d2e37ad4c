//! The values that cross the backend trait of products with block-sparse weights.

use blocksparse::WeightLayout;

use burn_blocksparse::internal::prelude::*;

/// The three products of a layer, of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// `x · W`: `[rows, inputs]` and `[blocks, block, block]` to `[rows, outputs]`.
    Forward,
    /// `dy · Wᵀ`: `[rows, outputs]` and `[blocks, block, block]` to `[rows, inputs]`.
    Input,
    /// `xᵀ · dy`: `[rows, inputs]` and `[rows, outputs]` to `[blocks, block, block]`.
    Weight,
}

/// Retained blocks of the weight, and the dtype of the result.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SparseLinearCall {
    /// The kept blocks.
    pub layout: WeightLayout,
    /// Forward: the dtype of the factors and of the product. Backward: that of the gradient.
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
        /// x in the product's dtype, if it had another.
        pub x: OptFloat,
        /// The weight in the product's dtype, if it had another.
        pub weight: OptFloat,
    }

    /// Tensors from which a gradient is computed.
    pub struct SparseLinearSaved {
        /// The other factor as it was multiplied: the weight `[blocks, block, block]` for the gradient with respect to x, x `[.., inputs]` for that of the weight.
        pub factor: FloatTensor,
        /// By the output, `[.., outputs]`.
        pub grad: FloatTensor,
    }
}
