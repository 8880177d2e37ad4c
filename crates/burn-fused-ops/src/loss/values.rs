//! The values that cross the backend trait of losses.

use burn_blocksparse::internal::prelude::*;

/// Reduction of the losses of positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Their mean over the positions that count; 0 without any.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// Nothing: each position has its loss, 0 if it does not count.
    None,
}

op_values! {
    /// The tensors of `linear_cross_entropy`.
    pub struct LossInputs {
        /// `[positions, width]`
        pub x: FloatTensor,
        /// `[width, vocab]`
        pub weight: FloatTensor,
        /// `[positions]`, i32 or i64.
        pub targets: IntTensor,
    }

    /// The loss, and what its gradients are made of. Gradients are those of the sum of the losses, whatever the reduction: in half precision those
    /// of the mean over many positions would be too small.
    pub struct LossOutput {
        /// `[1]`, or `[positions]` with [`Reduction::None`]; f32 or f64.
        pub loss: FloatTensor,
        /// `[1]`, likewise: what the sum was multiplied by.
        pub factor: FloatTensor,
        /// `[positions, width]` in x's dtype: by x, if it is wanted. None of losses of positions.
        pub x: OptFloat,
        /// `[width, vocab]` in the loss's dtype: by the weight, if it is wanted. None of losses of positions.
        pub weight: OptFloat,
    }

    /// Tensors saved for the backward pass.
    pub struct LossSaved {
        /// [`LossOutput::factor`].
        pub factor: FloatTensor,
        /// By the loss, `[1]`.
        pub grad: FloatTensor,
        /// [`LossOutput::x`].
        pub x: OptFloat,
        /// [`LossOutput::weight`].
        pub weight: OptFloat,
    }

    /// Gradients, as far as they are wanted.
    pub struct LossGrads {
        /// `[positions, width]`, in x's dtype.
        pub x: OptFloat,
        /// `[width, vocab]`, in the weight's dtype.
        pub weight: OptFloat,
    }
}

float_list!(LossGrads, 2: ; x weight);

/// Results that the forward pass computes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LossTask {
    /// Reduction of the losses.
    pub reduction: Reduction,
    /// The target that does not count.
    pub ignore_index: Option<i64>,
    /// Share of a target's probability that is spread over all.
    pub smoothing: f64,
    /// Logits that there are at a time, at most.
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
    /// Of x.
    pub x: FloatDType,
    /// Of the weight.
    pub weight: FloatDType,
}
