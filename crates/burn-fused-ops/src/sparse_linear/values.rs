//! The values that cross the backend trait of products with block-sparse weights.

use blocksparse::WeightLayout;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use burn_blocksparse::internal::values::OptFloat;

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

/// The factors of [`block_sparse_linear`](crate::sparse_linear::block_sparse_linear).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SparseLinearInputs<B: Backend> {
    /// `[.., inputs]`
    pub x: FloatTensor<B>,
    /// `[blocks, block, block]`
    pub weight: FloatTensor<B>,
}

/// Output of the forward pass.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SparseLinearOutput<B: Backend> {
    /// `[.., outputs]`, in the product's dtype.
    pub out: FloatTensor<B>,
    /// x in the product's dtype, if it had another.
    #[extension_type]
    pub x: OptFloat<B>,
    /// The weight in the product's dtype, if it had another.
    #[extension_type]
    pub weight: OptFloat<B>,
}

/// Tensors from which a gradient is computed.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct SparseLinearSaved<B: Backend> {
    /// The other factor as it was multiplied: the weight `[blocks, block, block]` for the gradient with respect to x, x `[.., inputs]` for that of the weight.
    pub factor: FloatTensor<B>,
    /// By the output, `[.., outputs]`.
    pub grad: FloatTensor<B>,
}
