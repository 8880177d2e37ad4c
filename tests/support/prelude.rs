//! Imports of nearly every check.

pub use burn::tensor::{Bool, DType, Device, Distribution, Gradients, Int, Tensor, TensorData};
pub use burn_blocksparse::{
    AttentionOptions, AttentionTensors, BlockLayout, DeviceLayout, Dropout, Layout, LayoutShape,
    OpError, Pattern, SparseAttentionCall, WeightsMode,
};
pub use rand::{Rng, RngExt, SeedableRng};
pub use rand_chacha::ChaCha8Rng;

pub use crate::attention::run::*;
pub use crate::devices::*;
pub use crate::judge::attention::{Answer, Expected, Near, Problem, Sizes};
pub use crate::judge::compare::*;
pub use crate::judge::numbers::*;
pub use crate::refused;
pub use crate::rows::{all, one, rows, settings};
pub use crate::shard::{shard, some_of};
