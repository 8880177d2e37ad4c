//! Bulk copies that are under way.

use super::races::Clock;
use super::tensor_map::TensorMap;
use crate::ptx::Way;

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
