//! Backend traits, and the values that cross them: for crates that serve another backend, not for users of the ops.

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

pub use crate::activation::ops::ActivationOps;
pub use crate::attention::ops::BlockSparseOps;
#[cfg(feature = "cuda")]
pub use crate::clusters::ops::ClusterOps;
pub use crate::dropout::ops::DropoutOps;
#[cfg(feature = "cube")]
pub use crate::dsa::ops::{
    ComparedKeys, IndexInputs, IndexerChoice, IndexerGrads, IndexerLoss, IndexerOps, IndexerScores,
    SeenKeys, TargetInputs,
};
pub use crate::embedding::ops::EmbeddingOps;
pub use crate::gates::ops::GateOps;
pub use crate::graph::ops::StaticInputOps;
pub use crate::heads::apart_ops::{HeadGroupOps, HeadGroups};
pub use crate::heads::ops::HeadOps;
pub use crate::linear::ops::LinearOps;
pub use crate::loss::ops::LossOps;
pub use crate::masses::ops::AccumulatedAttentionOps;
pub use crate::mlp::ops::MlpOps;
pub use crate::norm::ops::NormOps;
pub use crate::optim::ops::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, OptimOps, TensorList};
#[cfg(feature = "cube")]
pub use crate::order::ops::{OrderOps, SortedRounds, TopKLists, TopKPerCentroidLists};
pub use crate::paged::choice_ops::PageChoiceOps;
pub use crate::paged::ops::PagedOps;
pub use crate::paged::slot_ops::PageSlotOps;
pub use crate::projection::ops::ProjectionOps;
pub use crate::rows::ops::{
    KeyedGrads, KeyedRows, MeanRows, MergedGrads, MergedOutput, MergedParts, RowOps,
};
pub use crate::sampling::ops::SamplingOps;
#[cfg(feature = "cube")]
pub use crate::selection::estimate_ops::{CompressedCall, EstimateOps, LikeBlocks, MeanScores};
pub use crate::selection::key_list_ops::{
    TokenSparseCall, TokenSparseGrads, TokenSparseInputs, TokenSparseOps, TokenSparseOutput,
    TokenSparseSaved,
};
#[cfg(feature = "cuda")]
pub use crate::selection::list_ops::{
    BlockIndicesCall, BlockIndicesGrads, BlockIndicesInputs, BlockIndicesOps, BlockIndicesOutput,
    BlockIndicesSaved,
};
pub use crate::selection::ops::{
    QueriesOfBlocks, QueryTiles, SelectionOps, TopKBlocks, UniqueKeys,
};
pub use crate::sparse_linear::ops::BlockSparseLinearOps;
