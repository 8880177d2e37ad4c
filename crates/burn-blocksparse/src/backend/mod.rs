//! Backend traits, and the values that cross them: for crates that serve another backend, not for users of the ops.

pub use crate::base::values::{
    AccumulatedInputs, AccumulatedOutput, AttentionGrads, AttentionInputs, AttentionOutput,
    DynamicBlocks, KernelPlan, KnownOutput, LayoutTensors, NeedsGrad, OptFloat, OutputGrads,
    SavedTensors, ScoreTensors, ThreeFloats,
};
pub use crate::blocks::{BlockProduct, BlockSparseTensorOps};

pub use crate::attention::ops::BlockSparseOps;
pub use crate::graph::ops::StaticInputOps;
pub use crate::rows::ops::RowOps;
pub use crate::rows::values::{MergedGrads, MergedOutput, MergedParts};
pub use crate::sharded::ShardEnd;
pub use crate::sharded::ops::{KeysAndValues, ShardOps};
