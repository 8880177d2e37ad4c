//! Backend traits and the values in their signatures: for crates that add a backend, not for users of the ops.

pub use crate::embedding::ops::EmbeddingOps;
pub use crate::linear::ops::LinearOps;
pub use crate::linear::values::{
    ActivationGrads, ActivationSaved, ActivationTask, BiasedRows, HeadParts, JoinCall, Joined,
    LinearCall, LinearForm, LinearGrads, LinearInputs, LinearOutput, LinearSaved, LinearTask,
    MlpCall, MlpInputs, MlpOuterSaved, MlpOuterTask,
};
pub use crate::loss::ops::LossOps;
pub use crate::loss::values::{LossDtypes, LossGrads, LossInputs, LossOutput, LossSaved, LossTask};
pub use crate::norm::ops::NormOps;
pub use crate::norm::values::{
    NormBackwardCall, NormCall, NormGrads, NormInputs, NormOutput, NormOutputGrads, NormSaved,
};
pub use crate::optim::ops::OptimOps;
pub use crate::optim::values::{AdamWHyper, AdamWInputs, AdamWOutput, GradNorm, TensorList};
pub use crate::rope::ops::RopeOps;
pub use crate::rope::values::{RopeCall, RopeInputs, TurnedRows};
pub use crate::sparse_linear::ops::BlockSparseLinearOps;
pub use crate::sparse_linear::values::{
    Pass, SparseLinearCall, SparseLinearInputs, SparseLinearOutput, SparseLinearSaved,
};
