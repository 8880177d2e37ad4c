//! The backend trait of optimizers' steps.

use crate::optim::reference;
use crate::optim::values::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, TensorList};
#[cfg(feature = "fusion")]
use crate::optim::values::{AdamWOutputMetadata, GradNormMetadata};
use burn_blocksparse::internal::prelude::*;

/// Steps of optimizers as backend operations, on tensors that are not on an autodiff device. Arguments are checked by the public functions. A backend
/// writes in place what the call alone holds, and otherwise to tensors of its own.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait OptimOps: Backend {
    /// Writes sums of squares of the tensors into `partials`, from element `first` on: one for each 8,192 elements of a tensor. The dtype of
    /// `partials` is that of the sums. One that overflows is negative, and of numbers that are multiplied by 2⁻⁹⁶ first, or 2⁻⁷⁶⁸ in f64.
    #[fusion(dtype = partials, shape = partials)]
    fn sum_of_squares(
        #[extension_type] tensors: TensorList<Self>,
        partials: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self> {
        reference::sum_of_squares::<Self>(tensors, partials, first, true)
    }

    /// The norm of what has `partials` as its sums of squares, and the factor that clips it to the limit in `control`, of the same dtype.
    #[fusion(meta = |partials, _control| GradNormMetadata {
        norm: TensorSpec::new([1].into(), partials.dtype),
        factor: TensorSpec::new([1].into(), partials.dtype),
    })]
    fn clip_factor(partials: FloatTensor<Self>, control: FloatTensor<Self>) -> GradNorm<Self> {
        reference::clip_factor::<Self>(partials, control)
    }

    /// A step of AdamW; `control` is `[8]`, in the dtype of sums.
    #[fusion(meta = |inputs, _control, _numbers| AdamWOutputMetadata {
        parameters: inputs.parameters.clone(),
        first: inputs.first.clone(),
        second: inputs.second.clone(),
    })]
    fn adamw(
        #[extension_type] inputs: AdamWInputs<Self>,
        control: FloatTensor<Self>,
        numbers: AdamWHyper,
    ) -> AdamWOutput<Self> {
        reference::adamw::<Self>(inputs, control, numbers)
    }

    /// Writes the tensors, one after another, into `output` `[elements]`, from element `first` on; all are of its dtype.
    #[fusion(dtype = output, shape = output)]
    fn concat(
        #[extension_type] tensors: TensorList<Self>,
        output: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self> {
        reference::concat::<Self>(tensors, output, first)
    }

    /// The tensors multiplied by `factor`, `[1]`, in the dtype of their sums.
    #[fusion(meta = |tensors, _factor| tensors.clone())]
    fn scale(
        #[extension_type] tensors: TensorList<Self>,
        factor: FloatTensor<Self>,
    ) -> TensorList<Self> {
        reference::scale::<Self>(tensors, factor)
    }
}

reference_backends!(OptimOps);
