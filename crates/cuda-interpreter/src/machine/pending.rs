//! Bulk copies that are under way.

use super::races::Clock;
use super::tensor_map::TensorMap;

/// What becomes of what a bulk copy brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Replace,
    AddF32,
}

/// Which way a bulk copy goes.
#[derive(Clone, Copy, Debug)]
pub enum Way<At> {
    /// To shared memory, counted by a barrier.
    In {
        barrier: At,
    },
    Out(Effect),
}

/// What a copy moves outside of shared memory.
pub enum Moved {
    Bytes(u64, usize),
    /// A map, and the coordinates of a box.
    Box(TensorMap, Vec<i32>),
}

/// A copy, and who asked for it.
pub struct Pending {
    pub shared: u64,
    pub outside: Moved,
    pub way: Way<u64>,
    /// The warp and the lane that asked for it.
    pub thread: (usize, usize),
    /// What it knew then, where races are watched for, and where in the text it was.
    pub asked: Option<(Clock, u32)>,
}
