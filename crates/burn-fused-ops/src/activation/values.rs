//! The values that cross the backend trait of activations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use burn_blocksparse::internal::values::OptFloat;

/// What [`bias_activation`](crate::ops::bias_activation) makes of each number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// The number itself.
    #[default]
    None,
    /// `x · sigmoid(1.702 x)`, the Sparse Transformer's (Child et al., 2019, §5.2).
    GeluSigmoid,
    /// `x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))` (Hendrycks and Gimpel, 2016, §2).
    GeluTanh,
    /// `x / 2 · (1 + erf(x / √2))` (Hendrycks and Gimpel, 2016, §2): burn-nn's `Gelu`.
    GeluErf,
    /// `max(x, 0)`.
    Relu,
    /// `x · sigmoid(x)`, also known as swish.
    Silu,
}

impl Activation {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::GeluSigmoid,
        Self::GeluTanh,
        Self::GeluErf,
        Self::Relu,
        Self::Silu,
    ];
}

/// What an activation is made of.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct ActivationInputs<B: Backend> {
    /// `[.., width]`
    pub x: FloatTensor<B>,
    /// `[width]`, of any float dtype.
    #[extension_type]
    pub bias: OptFloat<B>,
}

/// What the backward pass gets.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct ActivationSaved<B: Backend> {
    /// `[.., width]`; none without an activation, whose gradient does not depend on it.
    #[extension_type]
    pub x: OptFloat<B>,
    /// `[width]`
    #[extension_type]
    pub bias: OptFloat<B>,
    /// By the result.
    pub grad: FloatTensor<B>,
}

/// Gradients, each of its input's shape and dtype, if it is wanted, and the activation.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct ActivationGrads<B: Backend> {
    /// `[.., width]`
    #[extension_type]
    pub x: OptFloat<B>,
    /// `[width]`
    #[extension_type]
    pub bias: OptFloat<B>,
    /// The activation again, `[.., width]`.
    #[extension_type]
    pub y: OptFloat<B>,
}

/// What the backward pass has to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActivationTask {
    /// Whether x's gradient is wanted.
    pub x: bool,
    /// The bias's dtype, if its gradient is wanted.
    pub bias: Option<FloatDType>,
    /// Whether the activation is wanted again. Then x's gradient is wanted, too, and there is an activation.
    pub y: bool,
}
