//! The backend trait of losses.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::loss::compute;
use crate::loss::compute::PrimitiveLosses;
use crate::loss::values::{LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask};

/// Losses as a backend operation. Arguments are checked by the public function.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait LossOps: Backend {
    /// The cross entropy of `x · weight` with targets, and what its gradients are made of.
    #[fusion(meta = meta::forward)]
    fn linear_cross_entropy(
        #[extension_type] inputs: LossInputs<Self>,
        task: LossTask,
    ) -> LossOutput<Self> {
        compute::forward::<Self, PrimitiveLosses<Self>>(inputs, task)
    }

    /// The gradients of the forward pass times the gradient by the loss.
    #[fusion(meta = meta::backward)]
    fn linear_cross_entropy_backward(
        #[extension_type] saved: LossSaved<Self>,
        dtypes: LossDtypes,
    ) -> LossGrads<Self> {
        compute::backward::<Self>(saved, dtypes)
    }

    /// The gradients of losses of positions ([`Reduction::None`](crate::ops::Reduction::None)) by a gradient for each, `[positions]`: logits are made again.
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

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::loss::values::{
        LossGradsMetadata, LossInputsMetadata, LossOutputMetadata, LossSavedMetadata, Reduction,
    };
    use burn_blocksparse::internal::dtype::accumulate_in;
    use burn_blocksparse::internal::values::OptFloatMetadata;

    pub fn forward(inputs: &LossInputsMetadata, task: &LossTask) -> LossOutputMetadata {
        let dtype = accumulate_in(inputs.x.dtype.into()).into();
        let one = TensorSpec::new([1].into(), dtype);
        let is_whole = task.reduction != Reduction::None;
        let [positions, _] = inputs.x.shape.dims::<2>();
        LossOutputMetadata {
            loss: match is_whole {
                true => one.clone(),
                false => TensorSpec::new([positions].into(), dtype),
            },
            factor: one,
            x: match task.by_x && is_whole {
                true => OptFloatMetadata::Some(inputs.x.clone()),
                false => OptFloatMetadata::None,
            },
            weight: match task.by_weight && is_whole {
                true => OptFloatMetadata::Some(TensorSpec::new(inputs.weight.shape.clone(), dtype)),
                false => OptFloatMetadata::None,
            },
        }
    }

    pub fn backward_of_positions(
        inputs: &LossInputsMetadata,
        _grad: &TensorSpec,
        task: &LossTask,
        dtypes: &LossDtypes,
    ) -> LossGradsMetadata {
        let of = |is_wanted: bool, tensor: &TensorSpec, dtype| match is_wanted {
            true => OptFloatMetadata::Some(TensorSpec::new(tensor.shape.clone(), dtype)),
            false => OptFloatMetadata::None,
        };
        LossGradsMetadata {
            x: of(task.by_x, &inputs.x, dtypes.x.into()),
            weight: of(task.by_weight, &inputs.weight, dtypes.weight.into()),
        }
    }

    pub fn backward(saved: &LossSavedMetadata, dtypes: &LossDtypes) -> LossGradsMetadata {
        let in_dtype = |tensor: &OptFloatMetadata, dtype| match tensor {
            OptFloatMetadata::Some(tensor) => {
                OptFloatMetadata::Some(TensorSpec::new(tensor.shape.clone(), dtype))
            }
            OptFloatMetadata::None => OptFloatMetadata::None,
        };
        LossGradsMetadata {
            x: in_dtype(&saved.x, dtypes.x.into()),
            weight: in_dtype(&saved.weight, dtypes.weight.into()),
        }
    }
}
