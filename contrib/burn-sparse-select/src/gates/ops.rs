//! The backend trait of gates.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::gates::reference;
use crate::gates::values::{GatedGrads, GatedInputs, GatedSaved, GatedTask};

/// Sums of branches that are gated by rows, as a backend operation. Arguments are checked by the functions that use it.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait GateOps: Backend {
    /// `Σ gate · branch` in the branches' dtype.
    #[fusion(meta = meta::forward)]
    fn gated_sum(#[extension_type] inputs: GatedInputs<Self>) -> FloatTensor<Self> {
        reference::forward::<Self>(inputs)
    }

    /// The backward pass: those gradients that `task` wants.
    #[fusion(meta = meta::backward)]
    fn gated_sum_backward(
        #[extension_type] saved: GatedSaved<Self>,
        task: GatedTask,
    ) -> GatedGrads<Self> {
        reference::backward::<Self>(saved, task)
    }
}

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::gates::values::{GatedGradsMetadata, GatedInputsMetadata, GatedSavedMetadata};
    use burn_blocksparse::internal::values::{OptFloatMetadata, ThreeFloatsMetadata};

    pub fn forward(inputs: &GatedInputsMetadata) -> TensorSpec {
        let ThreeFloatsMetadata {
            first,
            second,
            third,
        } = &inputs.branches;
        let there = [first, second, third].into_iter().find_map(|x| match x {
            OptFloatMetadata::Some(spec) => Some(spec.clone()),
            OptFloatMetadata::None => None,
        });
        there.expect("one branch")
    }

    pub fn backward(saved: &GatedSavedMetadata, task: &GatedTask) -> GatedGradsMetadata {
        let branches = &saved.inputs.branches;
        let branches = [&branches.first, &branches.second, &branches.third];
        let mut wanted =
            branches
                .into_iter()
                .zip(task.branches)
                .map(|(branch, wanted)| match branch {
                    OptFloatMetadata::Some(_) if wanted => {
                        OptFloatMetadata::Some(saved.grad.clone())
                    }
                    _ => OptFloatMetadata::None,
                });
        let [first, second, third] = [(); 3].map(|_| wanted.next().expect("three"));
        GatedGradsMetadata {
            branches: ThreeFloatsMetadata {
                first,
                second,
                third,
            },
            gates: match task.gates {
                true => OptFloatMetadata::Some(saved.inputs.gates.clone()),
                false => OptFloatMetadata::None,
            },
        }
    }
}
