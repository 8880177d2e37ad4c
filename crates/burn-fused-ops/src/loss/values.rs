//! Values in the signatures of the backend trait of losses.

use burn_blocksparse::internal::prelude::*;

/// Reduction of the losses of positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Mean over the positions that count; 0 if none does.
    #[default]
    Mean,
    /// Sum.
    Sum,
    /// No reduction: each position has its loss, 0 if it does not count.
    None,
}

op_values! {
    /// Input tensors of `linear_cross_entropy`.
    pub struct LossInputs {
        /// `[positions, width]`
        pub x: FloatTensor,
        /// `[width, vocab]`
        pub weight: FloatTensor,
        /// `[positions]`, i32 or i64.
        pub targets: IntTensor,
    }

    /// Loss and unscaled gradients. The gradients are those of the sum of the losses, whatever the reduction: those of a mean over many positions would be
    /// too small in half precision.
    pub struct LossOutput {
        /// Loss, `[1]`, or `[positions]` with [`Reduction::None`]; f32 or f64.
        pub loss: FloatTensor,
        /// Factor of the sum, `[1]`, in the same dtype.
        pub factor: FloatTensor,
        /// Gradient with respect to x, `[positions, width]` in x's dtype, if it is wanted. Absent with [`Reduction::None`].
        pub x: OptFloat,
        /// Gradient with respect to the weight, `[width, vocab]` in the loss's dtype, if it is wanted. Absent with [`Reduction::None`].
        pub weight: OptFloat,
    }

    /// Tensors saved for the backward pass.
    pub struct LossSaved {
        /// [`LossOutput::factor`].
        pub factor: FloatTensor,
        /// Gradient with respect to the loss, `[1]`.
        pub grad: FloatTensor,
        /// [`LossOutput::x`].
        pub x: OptFloat,
        /// [`LossOutput::weight`].
        pub weight: OptFloat,
    }

    /// Gradients that are wanted.
    pub struct LossGrads {
        /// With respect to x, `[positions, width]`, in x's dtype.
        pub x: OptFloat,
        /// With respect to the weight, `[width, vocab]`, in the weight's dtype.
        pub weight: OptFloat,
    }
}

float_list!(LossGrads, 2: ; x weight);

/// Parameters of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LossTask {
    /// Reduction of the losses.
    pub reduction: Reduction,
    /// Target that is ignored.
    pub ignore_index: Option<i64>,
    /// Share of a target's probability that is spread over the vocabulary.
    pub smoothing: f64,
    /// Most logits that exist at once.
    pub chunk_elements: usize,
    /// True if the gradient with respect to x is wanted.
    pub by_x: bool,
    /// True if the gradient with respect to the weight is wanted.
    pub by_weight: bool,
}

/// Dtypes of the results of the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LossDtypes {
    /// Dtype of x.
    pub x: FloatDType,
    /// Dtype of the weight.
    pub weight: FloatDType,
}
