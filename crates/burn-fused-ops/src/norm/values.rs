//! The values that cross the backend trait.

use blocksparse::ElementDropout;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::FloatDType;

use crate::norm::NormKind;
use burn_blocksparse::float_list;
use burn_blocksparse::internal::values::OptFloat;

/// Inputs of a residual norm.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct NormInputs<B: Backend> {
    /// `[.., width]`.
    pub stream: FloatTensor<B>,
    /// Branch that is added to it, of its shape.
    #[extension_type]
    pub branch: OptFloat<B>,
    /// `[width]`: what is added to the branch.
    #[extension_type]
    pub bias: OptFloat<B>,
    /// `[width]`, there if there is a norm.
    #[extension_type]
    pub gamma: OptFloat<B>,
    /// `[width]`.
    #[extension_type]
    pub beta: OptFloat<B>,
}

float_list!(NormInputs, 5: stream; branch bias gamma beta);

/// Output of a residual norm.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct NormOutput<B: Backend> {
    /// The stream with the branch, of the stream's shape and dtype. None without a branch: it is the stream that came.
    #[extension_type]
    pub stream: OptFloat<B>,
    /// The normed stream, if there is a norm: of the stream's shape, in the call's dtype.
    #[extension_type]
    pub normed: OptFloat<B>,
    /// Before gamma and beta, likewise, if it is to be stored.
    #[extension_type]
    pub xhat: OptFloat<B>,
    /// One over the standard deviation, `[rows]`, in the dtype of the stream's sums, if it is to be stored.
    #[extension_type]
    pub rstd: OptFloat<B>,
}

/// Tensors saved for the backward pass: all of it if there is a norm.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct NormSaved<B: Backend> {
    /// As [`NormOutput::xhat`].
    #[extension_type]
    pub xhat: OptFloat<B>,
    /// As [`NormOutput::rstd`].
    #[extension_type]
    pub rstd: OptFloat<B>,
    /// As [`NormInputs::gamma`].
    #[extension_type]
    pub gamma: OptFloat<B>,
}

/// Gradients of a loss with respect to the outputs, at least one.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "fusion"))]
#[non_exhaustive]
pub struct NormOutputGrads<B: Backend> {
    /// By the stream. None: 0.
    #[extension_type]
    pub stream: OptFloat<B>,
    /// By the normed stream. None: 0.
    #[extension_type]
    pub normed: OptFloat<B>,
}

/// Gradients with respect to the inputs, each of its input's shape and dtype; but the stream's only those that are wanted.
pub type NormGrads<B> = NormInputs<B>;

/// Parameters of a residual norm.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormCall {
    /// The norm. None: the stream with the branch alone.
    pub norm: Option<NormKind>,
    /// Term added to the variance.
    pub epsilon: f64,
    /// Dropout of the branch, of a probability above 0.
    pub dropout: Option<ElementDropout>,
    /// The normed stream's dtype.
    pub dtype: FloatDType,
    /// True if a backward pass will come, for which xhat and rstd are returned.
    pub keep: bool,
}

/// Parameters of a backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormBackwardCall {
    /// The forward pass.
    pub forward: NormCall,
    /// The stream's dtype.
    pub stream: FloatDType,
    /// The dtypes of the inputs whose gradients are wanted: the branch,
    pub branch: Option<FloatDType>,
    /// its bias,
    pub bias: Option<FloatDType>,
    /// gamma
    pub gamma: Option<FloatDType>,
    /// and beta.
    pub beta: Option<FloatDType>,
}
