//! The backend trait of optimizer steps.

use crate::optim::reference;
use crate::optim::values::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, TensorList};
#[cfg(feature = "fusion")]
use crate::optim::values::{AdamWOutputMetadata, GradNormMetadata};
use burn_blocksparse::internal::prelude::*;

/// Optimizer steps as backend operations, on tensors without autodiff. The public functions check the arguments. A backend writes in place what only the call
/// holds, and otherwise to new tensors.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait OptimOps: Backend {
    /// Writes sums of squares of the tensors into `partials`, from element `first` on: one for every 8,192 elements of a tensor, in the dtype of `partials`.
    /// A sum that would overflow is stored as the negative sum of squares of elements scaled by 2⁻⁹⁶ (2⁻⁷⁶⁸ in f64).
    #[fusion(dtype = partials, shape = partials)]
    fn sum_of_squares(
        #[extension_type] tensors: TensorList<Self>,
        partials: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self> {
        reference::sum_of_squares::<Self>(tensors, partials, first, true)
    }

    /// Returns the norm whose sums of squares are `partials`, and the factor that clips it to the limit in `control`, in the same dtype.
    #[fusion(meta = |partials, _control| GradNormMetadata {
        norm: TensorSpec::new([1].into(), partials.dtype),
        factor: TensorSpec::new([1].into(), partials.dtype),
    })]
    fn clip_factor(partials: FloatTensor<Self>, control: FloatTensor<Self>) -> GradNorm<Self> {
        reference::clip_factor::<Self>(partials, control)
    }

    /// Takes a step of AdamW; `control` is `[8]`, in the dtype of sums.
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

    /// Writes the tensors contiguously into `output` `[elements]`, from element `first` on; all have its dtype.
    #[fusion(dtype = output, shape = output)]
    fn concat(
        #[extension_type] tensors: TensorList<Self>,
        output: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self> {
        reference::concat::<Self>(tensors, output, first)
    }

    /// Multiplies the tensors by `factor`, `[1]`, in the dtype of their sums.
    #[fusion(meta = |tensors, _factor| tensors.clone())]
    fn scale(
        #[extension_type] tensors: TensorList<Self>,
        factor: FloatTensor<Self>,
    ) -> TensorList<Self> {
        reference::scale::<Self>(tensors, factor)
    }
}

reference_backends!(OptimOps);
