//! The backend trait of losses.

use crate::loss::compute;
use crate::loss::compute::PrimitiveLosses;
#[cfg(feature = "fusion")]
use crate::loss::values::LossGradsMetadata;
use crate::loss::values::{LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask};
use burn_blocksparse::internal::prelude::*;

/// Losses as backend operations. The public function checks the arguments.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait LossOps: Backend {
    /// Cross entropy of `x · weight` with targets, and the unscaled gradients.
    #[fusion(meta = meta::forward)]
    fn linear_cross_entropy(
        #[extension_type] inputs: LossInputs<Self>,
        task: LossTask,
    ) -> LossOutput<Self> {
        compute::forward::<Self, PrimitiveLosses<Self>>(inputs, task)
    }

    /// Multiplies the gradients of the forward pass by the gradient with respect to the loss.
    #[fusion(meta = |saved, dtypes| LossGradsMetadata {
        x: saved.x.cast(dtypes.x.into()),
        weight: saved.weight.cast(dtypes.weight.into()),
    })]
    fn linear_cross_entropy_backward(
        #[extension_type] saved: LossSaved<Self>,
        dtypes: LossDtypes,
    ) -> LossGrads<Self> {
        compute::backward::<Self>(saved, dtypes)
    }

    /// Computes the gradients for `Reduction::None` from a gradient for each loss, `[positions]`. The logits are recomputed.
    #[fusion(meta = meta::backward_of_positions)]
    fn position_cross_entropy_backward(
        #[extension_type] inputs: LossInputs<Self>,
        grad: FloatTensor<Self>,
        task: LossTask,
        dtypes: LossDtypes,
    ) -> LossGrads<Self> {
        compute::backward_of_positions::<Self, PrimitiveLosses<Self>>(inputs, grad, task, dtypes)
    }
}

reference_backends!(LossOps);

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use crate::loss::values::{LossInputsMetadata, LossOutputMetadata, Reduction};

    pub fn forward(inputs: &LossInputsMetadata, task: &LossTask) -> LossOutputMetadata {
        let dtype = sums_of(inputs.x.dtype);
        let is_whole = task.reduction != Reduction::None;
        let losses = match is_whole {
            true => 1,
            false => inputs.x.shape[0],
        };
        let weight = || TensorSpec::new(inputs.weight.shape.clone(), dtype);
        LossOutputMetadata {
            loss: TensorSpec::new([losses].into(), dtype),
            factor: TensorSpec::new([1].into(), dtype),
            x: (task.by_x && is_whole).then(|| inputs.x.clone()).into(),
            weight: (task.by_weight && is_whole).then(weight).into(),
        }
    }

    pub fn backward_of_positions(
        inputs: &LossInputsMetadata,
        _grad: &TensorSpec,
        task: &LossTask,
        dtypes: &LossDtypes,
    ) -> LossGradsMetadata {
        let of = |tensor: &TensorSpec, dtype: FloatDType| {
            TensorSpec::new(tensor.shape.clone(), dtype.into())
        };
        LossGradsMetadata {
            x: task.by_x.then(|| of(&inputs.x, dtypes.x)).into(),
            weight: task
                .by_weight
                .then(|| of(&inputs.weight, dtypes.weight))
                .into(),
        }
    }
}
