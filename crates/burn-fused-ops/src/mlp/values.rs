//! The values that cross the backend trait of feed-forward networks.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use crate::activation::values::Activation;
use burn_blocksparse::internal::values::OptFloat;

/// What a network is made of.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MlpInputs<B: Backend> {
    /// `[.., in]`
    pub x: FloatTensor<B>,
    /// `[in, hidden]`
    pub inner: FloatTensor<B>,
    /// `[hidden]`
    #[extension_type]
    pub bias: OptFloat<B>,
    /// `[hidden, out]`
    pub outer: FloatTensor<B>,
}

/// How a network computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MlpCall {
    /// Between the products.
    pub activation: Activation,
    /// Of the products.
    pub dtype: FloatDType,
    /// Whether the backward pass computes the first product again.
    pub recompute: bool,
}

/// What the first half of a forward pass returns.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MlpActive<B: Backend> {
    /// `f(x · W₁ + b)`, `[.., hidden]`.
    pub active: FloatTensor<B>,
    /// `x · W₁`, if it is wanted.
    #[extension_type]
    pub hidden: OptFloat<B>,
    /// x in the product's dtype, if it had another.
    #[extension_type]
    pub x: OptFloat<B>,
    /// W₁ in the product's dtype, if it had another.
    #[extension_type]
    pub inner: OptFloat<B>,
}

/// What is made of the first half.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MlpInnerInputs<B: Backend> {
    /// `[.., in]`
    pub x: FloatTensor<B>,
    /// `[in, hidden]`
    pub inner: FloatTensor<B>,
    /// `[hidden]`
    #[extension_type]
    pub bias: OptFloat<B>,
}

/// What the half of a backward pass before the activation gets.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct MlpOuterSaved<B: Backend> {
    /// `x · W₁`, `[.., hidden]`.
    pub hidden: FloatTensor<B>,
    /// `[hidden]`
    #[extension_type]
    pub bias: OptFloat<B>,
    /// W₂ as it was multiplied, `[hidden, out]`.
    pub outer: FloatTensor<B>,
    /// By the result, `[.., out]`.
    pub grad: FloatTensor<B>,
}

/// What that half computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MlpOuterTask {
    /// Between the products; not [`Activation::None`].
    pub activation: Activation,
    /// Of the products.
    pub dtype: FloatDType,
    /// The bias's dtype, if its gradient is wanted.
    pub bias: Option<FloatDType>,
    /// Whether the activation is wanted again.
    pub active: bool,
}
