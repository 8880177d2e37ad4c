//! Values in the signatures of the backend trait.

use blocksparse::ElementDropout;

use crate::norm::NormKind;
use burn_blocksparse::internal::prelude::*;

op_values! {
    /// Inputs of a residual norm.
    pub struct NormInputs {
        /// Residual stream, `[.., width]`.
        pub stream: FloatTensor,
        /// Branch added to the stream, of its shape.
        pub branch: OptFloat,
        /// Bias added to the branch, `[width]`.
        pub bias: OptFloat,
        /// Scale, `[width]`; present if there is a norm.
        pub gamma: OptFloat,
        /// Shift, `[width]`.
        pub beta: OptFloat,
    }

    /// Output of a residual norm.
    pub struct NormOutput {
        /// Sum of stream and branch, of the stream's shape and dtype. None without a branch: the sum is then the input stream.
        pub stream: OptFloat,
        /// Normed stream, if there is a norm: of the stream's shape, in the call's dtype.
        pub normed: OptFloat,
        /// Normed stream before gamma and beta, of the same shape and dtype, if it is to be stored.
        pub xhat: OptFloat,
        /// Reciprocal standard deviations, `[rows]`, in the dtype of the stream's sums, if they are to be stored.
        pub rstd: OptFloat,
    }

    /// Tensors saved for the backward pass: all of them if there is a norm.
    pub struct NormSaved {
        /// [`NormOutput::xhat`].
        pub xhat: OptFloat,
        /// [`NormOutput::rstd`].
        pub rstd: OptFloat,
        /// [`NormInputs::gamma`].
        pub gamma: OptFloat,
    }

    /// Gradients with respect to the outputs; at least one is present.
    pub struct NormOutputGrads {
        /// With respect to the sum of stream and branch; `None` is 0.
        pub stream: OptFloat,
        /// With respect to the normed stream; `None` is 0.
        pub normed: OptFloat,
    }
}

float_list!(NormInputs, 5: stream; branch bias gamma beta);

/// Gradients with respect to the inputs, each of its input's shape and dtype. The stream's is always present, the others if they are wanted.
pub type NormGrads<B> = NormInputs<B>;

/// Parameters of a residual norm.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormCall {
    /// Kind of norm. None: only the sum of stream and branch is computed.
    pub norm: Option<NormKind>,
    /// Term added to the variance.
    pub epsilon: f64,
    /// Dropout of the branch, with a probability above 0.
    pub dropout: Option<ElementDropout>,
    /// Dtype of the normed stream.
    pub dtype: FloatDType,
    /// True if a backward pass follows; xhat and rstd are then returned.
    pub keep: bool,
}

/// Parameters of a backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormBackwardCall {
    /// Parameters of the forward pass.
    pub forward: NormCall,
    /// Dtype of the stream.
    pub stream: FloatDType,
    /// Dtype of the branch, if its gradient is wanted.
    pub branch: Option<FloatDType>,
    /// Dtype of the bias, if its gradient is wanted.
    pub bias: Option<FloatDType>,
    /// Dtype of gamma, if its gradient is wanted.
    pub gamma: Option<FloatDType>,
    /// Dtype of beta, if its gradient is wanted.
    pub beta: Option<FloatDType>,
}
