//! The values that cross the backend trait.

use blocksparse::ElementDropout;

use crate::norm::NormKind;
use burn_blocksparse::internal::prelude::*;

op_values! {
    /// Inputs of a residual norm.
    pub struct NormInputs {
        /// `[.., width]`.
        pub stream: FloatTensor,
        /// Branch that is added to it, of its shape.
        pub branch: OptFloat,
        /// `[width]`: what is added to the branch.
        pub bias: OptFloat,
        /// `[width]`, there if there is a norm.
        pub gamma: OptFloat,
        /// `[width]`.
        pub beta: OptFloat,
    }

    /// Output of a residual norm.
    pub struct NormOutput {
        /// The stream with the branch, of the stream's shape and dtype. None without a branch: it is the stream that came.
        pub stream: OptFloat,
        /// The normed stream, if there is a norm: of the stream's shape, in the call's dtype.
        pub normed: OptFloat,
        /// Before gamma and beta, likewise, if it is to be stored.
        pub xhat: OptFloat,
        /// One over the standard deviation, `[rows]`, in the dtype of the stream's sums, if it is to be stored.
        pub rstd: OptFloat,
    }

    /// Tensors saved for the backward pass: all of it if there is a norm.
    pub struct NormSaved {
        /// As [`NormOutput::xhat`].
        pub xhat: OptFloat,
        /// As [`NormOutput::rstd`].
        pub rstd: OptFloat,
        /// As [`NormInputs::gamma`].
        pub gamma: OptFloat,
    }

    /// Gradients of a loss with respect to the outputs, at least one.
    pub struct NormOutputGrads {
        /// By the stream. None: 0.
        pub stream: OptFloat,
        /// By the normed stream. None: 0.
        pub normed: OptFloat,
    }
}

float_list!(NormInputs, 5: stream; branch bias gamma beta);

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
