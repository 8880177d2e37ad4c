//! Backend traits and their argument types, for crates that implement them for another backend. Users of the ops do not need them.

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
