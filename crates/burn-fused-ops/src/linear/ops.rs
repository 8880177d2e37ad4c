//! The backend trait of products.

use burn::backend::{Backend, backend_extension};
use burn::tensor::FloatDType;

use crate::linear::products;
use crate::linear::products::Primitives;
use crate::linear::values::{LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask};

/// Products as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait LinearOps: Backend {
    /// `x · [W₁ W₂ W₃]` of factors that are rounded to `dtype`, in it.
    #[fusion(meta = meta::forward)]
    fn linear_forward(
        #[extension_type] inputs: LinearInputs<Self>,
        dtype: FloatDType,
    ) -> LinearOutput<Self> {
        products::forward::<Self, Primitives>(inputs, dtype)
    }

    /// The backward pass: those gradients that `task` wants.
    #[fusion(meta = meta::backward)]
    fn linear_backward(
        #[extension_type] saved: LinearSaved<Self>,
        task: LinearTask,
    ) -> LinearGrads<Self> {
        products::backward::<Self, Primitives>(saved, task)
    }
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::linear::products::with_width;
    use crate::linear::values::{
        LinearGradsMetadata, LinearInputsMetadata, LinearOutputMetadata, LinearSavedMetadata,
    };
    use burn_blocksparse::internal::values::{OptFloatMetadata, ThreeFloatsMetadata};

    fn maybe(spec: Option<TensorSpec>) -> OptFloatMetadata {
        match spec {
            Some(spec) => OptFloatMetadata::Some(spec),
            None => OptFloatMetadata::None,
        }
    }

    pub fn forward(inputs: &LinearInputsMetadata, dtype: &FloatDType) -> LinearOutputMetadata {
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
        let dtype = (*dtype).into();
        let width = weights.iter().map(|weight| weight.shape[1]).sum();
        let is_joined = weights.len() > 1 || weights.iter().any(|weight| weight.dtype != dtype);
        let joined = || TensorSpec::new([weights[0].shape[0], width].into(), dtype);
        let rounded = || TensorSpec::new(inputs.x.shape.clone(), dtype);
        LinearOutputMetadata {
            out: TensorSpec::new(with_width(&inputs.x.shape, width), dtype),
            rounded: maybe((inputs.x.dtype != dtype).then(rounded)),
            joined: maybe(is_joined.then(joined)),
        }
    }

    pub fn backward(saved: &LinearSavedMetadata, task: &LinearTask) -> LinearGradsMetadata {
        let shape = with_width(&saved.grad.shape, task.inputs);
        let [first, second, third] = task.weights.map(|weight| {
            let wanted = weight.and_then(|(width, dtype)| Some((width, dtype?)));
            let spec = |(width, dtype): (usize, FloatDType)| {
                TensorSpec::new([task.inputs, width].into(), dtype.into())
            };
            maybe(wanted.map(spec))
        });
        LinearGradsMetadata {
            x: maybe(task.x.map(|dtype| TensorSpec::new(shape, dtype.into()))),
            weights: ThreeFloatsMetadata {
                first,
                second,
                third,
            },
        }
    }
}
