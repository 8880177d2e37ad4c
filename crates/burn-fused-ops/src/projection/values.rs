//! The values that cross the backend trait of projections.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use crate::heads::values::HeadParts;
use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

/// What is projected to heads.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct ProjectionInputs<B: Backend> {
    /// `[batch, seq, in]`
    pub x: FloatTensor<B>,
    /// `[in, out]` each.
    #[extension_type]
    pub weights: ThreeFloats<B>,
    /// `[Σ out]`, of any float dtype.
    #[extension_type]
    pub bias: OptFloat<B>,
}

/// What a projection to heads returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct ProjectionOutput<B: Backend> {
    /// `[batch, heads, seq, width]` each, in the product's dtype.
    #[extension_type]
    pub heads: ThreeFloats<B>,
    /// x in the product's dtype, if it had another.
    #[extension_type]
    pub rounded: OptFloat<B>,
    /// The weights side by side in the product's dtype, `[in, Σ out]`, if that is not the one weight itself.
    #[extension_type]
    pub joined: OptFloat<B>,
}

/// How a projection to heads computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProjectionCall {
    /// Of the factors and the results.
    pub dtype: FloatDType,
    /// The heads of each result, and their width.
    pub parts: HeadParts,
}

/// What is projected from heads.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergeInputs<B: Backend> {
    /// `[batch, heads, seq, width]`
    pub x: FloatTensor<B>,
    /// `[heads · width, out]`
    pub weight: FloatTensor<B>,
}

/// What a projection from heads returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergeOutput<B: Backend> {
    /// `[batch, seq, out]`, in the product's dtype.
    pub out: FloatTensor<B>,
    /// The weight in the product's dtype, if it had another.
    #[extension_type]
    pub weight: OptFloat<B>,
}

/// What the backward pass of a projection from heads gets, as far as a gradient that is wanted needs it.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergeSaved<B: Backend> {
    /// `[batch, heads, seq, width]`
    #[extension_type]
    pub x: OptFloat<B>,
    /// The weight as it was multiplied.
    #[extension_type]
    pub weight: OptFloat<B>,
    /// By the output.
    pub grad: FloatTensor<B>,
}

/// Gradients, each of its input's shape and dtype, if it is wanted.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MergeGrads<B: Backend> {
    /// `[batch, heads, seq, width]`
    #[extension_type]
    pub x: OptFloat<B>,
    /// `[heads · width, out]`
    #[extension_type]
    pub weight: OptFloat<B>,
}

/// What that backward pass has to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MergeTask {
    /// Heads and their width.
    pub heads: (usize, usize),
    /// The dtype of the product.
    pub dtype: FloatDType,
    /// x's dtype, if its gradient is wanted.
    pub x: Option<FloatDType>,
    /// The weight's dtype, if its gradient is wanted.
    pub weight: Option<FloatDType>,
}
