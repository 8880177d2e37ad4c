//! The backend trait of projections to heads and from them.

use burn::backend::backend_extension;

use crate::heads::ops::HeadOps;
use crate::linear::ops::LinearOps;
use crate::projection::steps;
use crate::projection::values::{
    MergeGrads, MergeInputs, MergeOutput, MergeSaved, MergeTask, ProjectionCall, ProjectionInputs,
    ProjectionOutput,
};

/// Products whose result or whose left factor lies by heads, as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait ProjectionOps: LinearOps + HeadOps {
    /// `x · [W₁ W₂ W₃] + b` by heads.
    #[fusion(meta = meta::project)]
    fn project_heads(
        #[extension_type] inputs: ProjectionInputs<Self>,
        call: ProjectionCall,
    ) -> ProjectionOutput<Self> {
        steps::project::<Self>(inputs, call)
    }

    /// `x · W` of x by heads.
    #[fusion(meta = meta::merge)]
    fn merge_heads(
        #[extension_type] inputs: MergeInputs<Self>,
        task: MergeTask,
    ) -> MergeOutput<Self> {
        steps::merge::<Self>(inputs, task)
    }

    /// The backward pass of [`Self::merge_heads`]: those gradients that `task` wants.
    #[fusion(meta = meta::merge_backward)]
    fn merge_heads_backward(
        #[extension_type] saved: MergeSaved<Self>,
        task: MergeTask,
    ) -> MergeGrads<Self> {
        steps::merge_backward::<Self>(saved, task)
    }
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::projection::values::{
        MergeGradsMetadata, MergeInputsMetadata, MergeOutputMetadata, MergeSavedMetadata,
        ProjectionInputsMetadata, ProjectionOutputMetadata,
    };
    use burn_blocksparse::internal::values::{OptFloatMetadata, ThreeFloatsMetadata};

    fn maybe(spec: Option<TensorSpec>) -> OptFloatMetadata {
        match spec {
            Some(spec) => OptFloatMetadata::Some(spec),
            None => OptFloatMetadata::None,
        }
    }

    pub fn project(
        inputs: &ProjectionInputsMetadata,
        call: &ProjectionCall,
    ) -> ProjectionOutputMetadata {
        let ThreeFloatsMetadata {
            first,
            second,
            third,
        } = &inputs.weights;
        let weights: Vec<&TensorSpec> = [first, second, third]
            .into_iter()
            .filter_map(|weight| match weight {
                OptFloatMetadata::Some(weight) => Some(weight),
                OptFloatMetadata::None => None,
            })
            .collect();
        let dtype = call.dtype.into();
        let [batch, seq, inner] = inputs.x.shape.dims::<3>();
        let width: usize = weights.iter().map(|weight| weight.shape[1]).sum();
        let is_joined = weights.len() > 1 || weights.iter().any(|weight| weight.dtype != dtype);
        let [first, second, third] = call.parts.map(|part| {
            maybe(part.map(|(heads, dim)| TensorSpec::new([batch, heads, seq, dim].into(), dtype)))
        });
        ProjectionOutputMetadata {
            heads: ThreeFloatsMetadata {
                first,
                second,
                third,
            },
            rounded: maybe(
                (inputs.x.dtype != dtype).then(|| TensorSpec::new(inputs.x.shape.clone(), dtype)),
            ),
            joined: maybe(is_joined.then(|| TensorSpec::new([inner, width].into(), dtype))),
        }
    }

    pub fn merge(inputs: &MergeInputsMetadata, task: &MergeTask) -> MergeOutputMetadata {
        let dtype = task.dtype.into();
        let [batch, _, seq, _] = inputs.x.shape.dims::<4>();
        let weight = &inputs.weight;
        MergeOutputMetadata {
            out: TensorSpec::new([batch, seq, weight.shape[1]].into(), dtype),
            weight: maybe(
                (weight.dtype != dtype).then(|| TensorSpec::new(weight.shape.clone(), dtype)),
            ),
        }
    }

    pub fn merge_backward(saved: &MergeSavedMetadata, task: &MergeTask) -> MergeGradsMetadata {
        let [batch, seq, outputs] = saved.grad.shape.dims::<3>();
        let (heads, dim) = task.heads;
        MergeGradsMetadata {
            x: maybe(
                task.x
                    .map(|dtype| TensorSpec::new([batch, heads, seq, dim].into(), dtype.into())),
            ),
            weight: maybe(
                task.weight
                    .map(|dtype| TensorSpec::new([heads * dim, outputs].into(), dtype.into())),
            ),
        }
    }
}
