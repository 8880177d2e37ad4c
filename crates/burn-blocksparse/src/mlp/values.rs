//! The values that cross the backend trait of feed-forward networks.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use crate::activation::values::Activation;
use crate::values::MaybeFloat;

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
    pub bias: MaybeFloat<B>,
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
