//! Bulk copies that are under way.

use super::races::Clock;
use super::tensor_map::TensorMap;
use crate::ptx::Effect;

/// What it moves.
pub enum Kind {
    Load {
        to: u64,
        from: u64,
        bytes: usize,
        barrier: u64,
    },
    Store {
        to: u64,
        from: u64,
        bytes: usize,
        effect: Effect,
    },
    LoadTensor {
        to: u64,
        map: TensorMap,
        coordinates: Vec<i32>,
        barrier: u64,
    },
    StoreTensor {
        map: TensorMap,
        coordinates: Vec<i32>,
        from: u64,
        effect: Effect,
    },
}

/// A copy, and who asked for it.
pub struct Pending {
    pub kind: Kind,
    /// The warp and the lane that asked for it.
    pub thread: (usize, usize),
    /// What it knew then, where races are watched for, and where in the text it was.
    pub asked: Option<(Clock, u32)>,
}
