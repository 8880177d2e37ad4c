//! The backend trait of attention. The default bodies are the reference implementation in Burn primitives.

use crate::attention::reference;
use crate::base::values::{
    AttentionGrads, AttentionInputs, AttentionOutput, KnownOutput, LayoutTensors, NeedsGrad,
    OutputGrads, SavedTensors,
};
use crate::options::AttentionOptions;
use burn::backend::{Backend, backend_extension};

/// Block-sparse attention as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait BlockSparseOps: Backend {
    /// The forward pass.
    #[fusion(meta = meta::forward)]
    fn block_sparse_attention(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        reference::forward::<Self>(inputs, &layout, &options)
    }

    /// The forward pass of a call whose output is known, without weights and largest scores: nothing is computed. What autodiff makes of it has the
    /// gradients of [`Self::block_sparse_attention`] by `inputs`, and none by `given`.
    #[fusion(meta = meta::given)]
    fn block_sparse_attention_known(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] given: KnownOutput<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        let _ = (inputs, layout, options);
        given.into()
    }

    /// The backward pass: gradients of a loss whose gradients with respect to the outputs are `grads`; the biases' only if they are `wanted`.
    #[fusion(meta = meta::backward)]
    fn block_sparse_attention_backward(
        #[extension_type] saved: SavedTensors<Self>,
        #[extension_type] grads: OutputGrads<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
        wanted: NeedsGrad,
    ) -> AttentionGrads<Self> {
        reference::backward::<Self>(saved, grads, &layout, &options, wanted)
    }

    /// The backward pass as operations that autodiff can differentiate, on backends without kernels. Weights are not given.
    #[fusion(meta = meta::backward)]
    fn block_sparse_attention_gradients(
        #[extension_type] saved: SavedTensors<Self>,
        #[extension_type] grads: OutputGrads<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
        wanted: NeedsGrad,
    ) -> AttentionGrads<Self> {
        reference::backward::<Self>(saved, grads, &layout, &options, wanted)
    }
}

/// Output shapes and dtypes for fusion, which never compares them with what the backend returns.
#[cfg(feature = "fusion")]
mod meta {
    use burn::backend::fusion::custom::TensorSpec;

    use super::*;
    use crate::base::dtype::accumulate_in;
    use crate::base::values::{
        AttentionGradsMetadata, AttentionInputsMetadata, AttentionOutputMetadata,
        KnownOutputMetadata, LayoutTensorsMetadata, OptFloatMetadata, OutputGradsMetadata,
        SavedTensorsMetadata, ScoreTensorsMetadata,
    };
    use crate::options::WeightsMode;
    use crate::weights;

    pub fn forward(
        inputs: &AttentionInputsMetadata,
        layout: &LayoutTensorsMetadata,
        options: &AttentionOptions,
    ) -> AttentionOutputMetadata {
        let [batch, heads, seq_q, _] = inputs.q.shape.dims::<4>();
        let value_dim = inputs.v.shape[3];
        let dtype = accumulate_in(inputs.q.dtype.into()).into();
        let rows = TensorSpec::new([batch, heads, seq_q].into(), dtype);
        AttentionOutputMetadata {
            out: TensorSpec::new([batch, heads, seq_q, value_dim].into(), inputs.q.dtype),
            lse: rows.clone(),
            weights: match options.weights {
                WeightsMode::Recompute => OptFloatMetadata::None,
                WeightsMode::Store => OptFloatMetadata::Some(TensorSpec::new(
                    weights::shape(&layout.host, batch).into(),
                    dtype,
                )),
            },
            max_scores: match options.max_scores {
                true => OptFloatMetadata::Some(rows),
                false => OptFloatMetadata::None,
            },
        }
    }

    pub fn given(
        _inputs: &AttentionInputsMetadata,
        given: &KnownOutputMetadata,
        _layout: &LayoutTensorsMetadata,
        _options: &AttentionOptions,
    ) -> AttentionOutputMetadata {
        AttentionOutputMetadata {
            out: given.out.clone(),
            lse: given.lse.clone(),
            weights: OptFloatMetadata::None,
            max_scores: OptFloatMetadata::None,
        }
    }

    pub fn backward(
        saved: &SavedTensorsMetadata,
        _grads: &OutputGradsMetadata,
        _layout: &LayoutTensorsMetadata,
        _options: &AttentionOptions,
        wanted: &NeedsGrad,
    ) -> AttentionGradsMetadata {
        let only = |input: &OptFloatMetadata, wanted: bool| match input {
            OptFloatMetadata::Some(input) if wanted => OptFloatMetadata::Some(input.clone()),
            _ => OptFloatMetadata::None,
        };
        AttentionGradsMetadata {
            q: saved.inputs.q.clone(),
            k: saved.inputs.k.clone(),
            v: saved.inputs.v.clone(),
            scores: ScoreTensorsMetadata {
                bias: only(&saved.inputs.scores.bias, wanted.bias),
                relative_bias: only(&saved.inputs.scores.relative_bias, wanted.relative_bias),
            },
        }
    }
}

#[cfg(feature = "flex")]
impl BlockSparseOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl BlockSparseOps for burn::backend::NdArray {}
