//! The backend trait of gates.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

use crate::gates::reference;
use crate::gates::values::{GatedGrads, GatedInputs, GatedSaved, GatedTask};
use burn_blocksparse::reference_backends;

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

reference_backends!(GateOps);

/// Output shapes and dtypes for fusion.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::gates::values::{GatedGradsMetadata, GatedInputsMetadata, GatedSavedMetadata};
    use burn_blocksparse::internal::values::ThreeFloatsMetadata;

    pub fn forward(inputs: &GatedInputsMetadata) -> TensorSpec {
        let there = inputs.branches.list().into_iter().flatten().next();
        there.expect("one branch").clone()
    }

    pub fn backward(saved: &GatedSavedMetadata, task: &GatedTask) -> GatedGradsMetadata {
        let branches = saved.inputs.branches.list();
        let wanted = |at: usize| branches[at].is_some() && task.branches[at];
        let branches = std::array::from_fn(|at| wanted(at).then(|| saved.grad.clone()));
        GatedGradsMetadata {
            branches: ThreeFloatsMetadata::of_list(branches),
            gates: task.gates.then(|| saved.inputs.gates.clone()).into(),
        }
    }
}
