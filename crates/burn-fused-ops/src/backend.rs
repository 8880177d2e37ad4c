//! Backend traits, and the values that cross them: for crates that serve another backend, not for users of the ops.

pub use crate::activation::ops::ActivationOps;
pub use crate::activation::values::{
    ActivationGrads, ActivationInputs, ActivationSaved, ActivationTask,
};
pub use crate::dropout::ops::DropoutOps;
pub use crate::embedding::ops::EmbeddingOps;
pub use crate::heads::apart_ops::{HeadGroupOps, HeadGroups};
pub use crate::heads::ops::HeadOps;
pub use crate::heads::values::{HeadParts, JoinCall, Joined, SplitInputs};
pub use crate::linear::ops::LinearOps;
pub use crate::linear::values::{LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask};
pub use crate::loss::ops::LossOps;
pub use crate::loss::values::{LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask};
pub use crate::mlp::ops::MlpOps;
pub use crate::mlp::values::{
    MlpActive, MlpCall, MlpInnerInputs, MlpInputs, MlpOuterSaved, MlpOuterTask,
};
pub use crate::norm::ops::NormOps;
pub use crate::norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
pub use crate::optim::ops::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, OptimOps, TensorList};
pub use crate::projection::ops::ProjectionOps;
pub use crate::projection::values::{
    MergeGrads, MergeInputs, MergeOutput, MergeSaved, MergeTask, ProjectionCall, ProjectionInputs,
    ProjectionOutput,
};
pub use crate::sparse_linear::ops::BlockSparseLinearOps;
pub use crate::sparse_linear::values::{
    SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
