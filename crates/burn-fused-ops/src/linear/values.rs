//! The values that cross the backend trait of products.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use burn_blocksparse::internal::values::{OptFloat, ThreeFloats};

/// How many weights a call may have.
pub const WEIGHTS: usize = 3;

/// The factors of [`linear`](crate::linear()).
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct LinearInputs<B: Backend> {
    /// `[.., in]`
    pub x: FloatTensor<B>,
    /// `[in, out]` each.
    #[extension_type]
    pub weights: ThreeFloats<B>,
}

/// What the forward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct LinearOutput<B: Backend> {
    /// `[.., Σ out]`, in the product's dtype.
    pub out: FloatTensor<B>,
    /// x in the product's dtype, if it had another.
    #[extension_type]
    pub rounded: OptFloat<B>,
    /// The weights side by side in the product's dtype, `[in, Σ out]`, if that is not the one weight itself.
    #[extension_type]
    pub joined: OptFloat<B>,
}

/// What the backward pass gets, as far as a gradient that is wanted needs it.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct LinearSaved<B: Backend> {
    /// x as it was multiplied, `[.., in]`.
    #[extension_type]
    pub x: OptFloat<B>,
    /// The weights as they were multiplied, `[in, Σ out]`.
    #[extension_type]
    pub weight: OptFloat<B>,
    /// By the output, `[.., Σ out]`.
    pub grad: FloatTensor<B>,
}

/// Gradients, each of its input's shape and dtype, if it is wanted.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct LinearGrads<B: Backend> {
    /// `[.., in]`
    #[extension_type]
    pub x: OptFloat<B>,
    /// `[in, out]` each.
    #[extension_type]
    pub weights: ThreeFloats<B>,
}

/// What the backward pass has to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearTask {
    /// Columns of x.
    pub inputs: usize,
    /// x's dtype, if its gradient is wanted.
    pub x: Option<FloatDType>,
    /// Of each weight its columns and, if its gradient is wanted, its dtype. None: there is no such weight.
    pub weights: [Option<(usize, Option<FloatDType>)>; WEIGHTS],
}
