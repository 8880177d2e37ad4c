//! The backend trait of attention. The default bodies are the reference implementation in Burn primitives.

use std::ops::Range;

use crate::attention::reference;
use crate::base::prelude::*;
use crate::base::values::{
    AccumulatedInputs, AccumulatedOutput, AttentionGrads, AttentionInputs, AttentionOutput,
    KnownOutput, LayoutTensors, NeedsGrad, OutputGrads, SavedTensors,
};
#[cfg(feature = "fusion")]
use crate::base::values::{
    AttentionInputsMetadata, AttentionOutputMetadata, OptFloatMetadata, ScoreTensorsMetadata,
};
use crate::options::AttentionOptions;

/// Block-sparse attention as a backend operation. Arguments are checked by the public functions.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait BlockSparseOps: Backend {
    /// Computes the forward pass.
    #[fusion(meta = meta::forward)]
    fn block_sparse_attention(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        reference::forward::<Self>(inputs, &layout, &options)
    }

    /// Returns the forward pass of a call whose output is known, without weights and row maxima. Nothing is computed. Under autodiff it has the
    /// gradients of [`Self::block_sparse_attention`] with respect to `inputs`, and none with respect to `given`.
    #[fusion(meta = |_inputs, given, _layout, _options| AttentionOutputMetadata {
        out: given.out.clone(),
        lse: given.lse.clone(),
        weights: OptFloatMetadata::None,
        max_scores: OptFloatMetadata::None,
    })]
    fn block_sparse_attention_known(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] given: KnownOutput<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
    ) -> AttentionOutput<Self> {
        let _ = (inputs, layout, options);
        given.into()
    }

    /// Computes the backward pass: the gradients of a loss whose gradients with respect to the outputs are `grads`. Gradients of biases are computed only if
    /// `wanted`. On autodiff tensors it consists of operations of the graph, which can be differentiated again.
    #[fusion(meta = |saved, _grads, _layout, _options, wanted| AttentionInputsMetadata {
        q: saved.inputs.q.clone(),
        k: saved.inputs.k.clone(),
        v: saved.inputs.v.clone(),
        scores: ScoreTensorsMetadata {
            bias: saved.inputs.scores.bias.wanted(wanted.bias),
            relative_bias: saved.inputs.scores.relative_bias.wanted(wanted.relative_bias),
        },
    })]
    fn block_sparse_attention_backward(
        #[extension_type] saved: SavedTensors<Self>,
        #[extension_type] grads: OutputGrads<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
        wanted: NeedsGrad,
    ) -> AttentionGrads<Self> {
        reference::backward::<Self>(saved, grads, &layout, &options, wanted)
    }

    /// Computes the sums of the weights of `queries` over columns and diagonals.
    #[fusion(meta = meta::accumulated)]
    fn accumulated_attention(
        #[extension_type] inputs: AccumulatedInputs<Self>,
        #[extension_type] layout: LayoutTensors<Self>,
        options: AttentionOptions,
        queries: Range<usize>,
    ) -> AccumulatedOutput<Self> {
        reference::attention_sums::<Self>(inputs, &layout, &options, queries)
    }
}

reference_backends!(BlockSparseOps);

/// Output shapes and dtypes for fusion, which never compares them with the backend's results.
#[cfg(feature = "fusion")]
mod meta {
    use super::*;
    use crate::base::values::{
        AccumulatedInputsMetadata, AccumulatedOutputMetadata, LayoutTensorsMetadata,
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
        let dtype = sums_of(inputs.q.dtype);
        let rows = TensorSpec::new([batch, heads, seq_q].into(), dtype);
        let is_stored = options.weights == WeightsMode::Store;
        let weights = || TensorSpec::new(weights::shape(&layout.host, batch).into(), dtype);
        AttentionOutputMetadata {
            out: TensorSpec::new([batch, heads, seq_q, value_dim].into(), inputs.q.dtype),
            lse: rows.clone(),
            weights: is_stored.then(weights).into(),
            max_scores: options.max_scores.then_some(rows).into(),
        }
    }

    pub fn accumulated(
        inputs: &AccumulatedInputsMetadata,
        _layout: &LayoutTensorsMetadata,
        _options: &AttentionOptions,
        _queries: &Range<usize>,
    ) -> AccumulatedOutputMetadata {
        let [batch, heads, seq_q] = inputs.lse.shape.dims::<3>();
        let seq_kv = inputs.k.shape[2];
        let spec = |length: usize| TensorSpec::new([batch, heads, length].into(), inputs.lse.dtype);
        AccumulatedOutputMetadata {
            columns: spec(seq_kv),
            diagonals: spec(seq_q + seq_kv - 1),
        }
    }
}
