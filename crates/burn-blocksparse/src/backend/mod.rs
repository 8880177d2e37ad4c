//! Backend traits, and the values that cross them: for crates that serve another backend, not for users of the ops.

mod activation;
mod block_sparse;
#[cfg(feature = "cuda")]
mod clusters;
mod dropout;
mod embedding;
#[cfg(feature = "cube")]
mod estimates;
mod fixed;
mod gates;
mod heads;
mod heads_apart;
#[cfg(feature = "cube")]
mod indexer;
mod key_lists;
mod linear;
#[cfg(feature = "cuda")]
mod listed;
mod loss;
mod masses;
mod mlp;
mod norm;
mod optim;
#[cfg(feature = "cube")]
mod order;
mod page_choice;
mod page_slots;
mod paged;
mod projection;
mod rows;
mod sampling;
mod selection;

pub use crate::activation::values::{
    ActivationGrads, ActivationInputs, ActivationSaved, ActivationTask,
};
pub use crate::blocks::BlockSparseTensorOps;
pub use crate::gates::values::{GatedGrads, GatedInputs, GatedSaved, GatedTask};
pub use crate::heads::values::{HeadParts, JoinCall, Joined, SplitInputs};
pub use crate::linear::values::{LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask};
pub use crate::loss::values::{LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask};
pub use crate::mlp::values::{
    MlpActive, MlpCall, MlpInnerInputs, MlpInputs, MlpOuterSaved, MlpOuterTask,
};
pub use crate::norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
pub use crate::paged::values::{
    AppendInputs, AppendPacked, OptInt, PackedPages, PageChoiceCall, PageScoreInputs, PagedCall,
    PagedInputs, PagedRows, Pages, StoredPages, SummarizeInputs,
};
pub use crate::projection::values::{
    MergeGrads, MergeInputs, MergeOutput, MergeSaved, MergeTask, ProjectionCall, ProjectionInputs,
    ProjectionOutput,
};
pub use crate::sparse_linear::values::{
    SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
pub use crate::values::{
    AccumulatedInputs, AccumulatedOutput, AttentionGrads, AttentionInputs, AttentionOutput,
    DynamicBlocks, KernelPlan, KnownOutput, LayoutTensors, NeedsGrad, OptFloat, OutputGrads,
    SavedTensors, ScoreTensors, ThreeFloats,
};

use burn::backend::{Backend, backend_extension};

pub use activation::ActivationOps;
pub use block_sparse::BlockSparseLinearOps;
#[cfg(feature = "cuda")]
pub use clusters::ClusterOps;
pub use dropout::DropoutOps;
pub use embedding::EmbeddingOps;
#[cfg(feature = "cube")]
pub use estimates::{CompressedCall, EstimateOps, LikeBlocks, MeanScores};
pub use fixed::StaticInputOps;
pub use gates::GateOps;
pub use heads::HeadOps;
pub use heads_apart::{HeadGroupOps, HeadGroups};
#[cfg(feature = "cube")]
pub use indexer::{
    ComparedKeys, IndexInputs, IndexerChoice, IndexerGrads, IndexerLoss, IndexerOps, IndexerScores,
    SeenKeys, TargetInputs,
};
pub use key_lists::{
    TokenSparseCall, TokenSparseGrads, TokenSparseInputs, TokenSparseOps, TokenSparseOutput,
    TokenSparseSaved,
};
pub use linear::LinearOps;
#[cfg(feature = "cuda")]
pub use listed::{
    BlockIndicesCall, BlockIndicesGrads, BlockIndicesInputs, BlockIndicesOps, BlockIndicesOutput,
    BlockIndicesSaved,
};
pub use loss::LossOps;
pub use masses::AccumulatedAttentionOps;
pub use mlp::MlpOps;
pub use norm::NormOps;
pub use optim::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, OptimOps, TensorList};
pub(crate) use optim::{CONTROL, LIMIT, MOST_TENSORS};
#[cfg(feature = "cube")]
pub use order::{OrderOps, SortedRounds, TopKLists, TopKPerCentroidLists};
pub use page_choice::PageChoiceOps;
pub use page_slots::PageSlotOps;
pub use paged::PagedOps;
pub use projection::ProjectionOps;
pub use rows::{KeyedGrads, KeyedRows, MeanRows, MergedGrads, MergedOutput, MergedParts, RowOps};
pub use sampling::SamplingOps;
pub use selection::{QueriesOfBlocks, QueryTiles, SelectionOps, TopKBlocks, UniqueKeys};

use crate::options::AttentionOptions;
use crate::reference;

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
    use crate::dtype::accumulate_in;
    use crate::options::WeightsMode;
    use crate::values::{
        AttentionGradsMetadata, AttentionInputsMetadata, AttentionOutputMetadata,
        KnownOutputMetadata, LayoutTensorsMetadata, OptFloatMetadata, OutputGradsMetadata,
        SavedTensorsMetadata, ScoreTensorsMetadata,
    };
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
