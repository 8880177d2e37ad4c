//! Pending bulk copies.

use super::races::Clock;
use super::tensor_map::TensorMap;

/// How a bulk copy writes its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Replace,
    AddF32,
}

/// Direction of a bulk copy.
#[derive(Clone, Copy, Debug)]
pub enum Way<At> {
    /// To shared memory, counted by a barrier.
    In {
        barrier: At,
    },
    Out(Effect),
}

/// Operand of a copy outside of shared memory.
pub enum Moved {
    Bytes(u64, usize),
    /// A map and the coordinates of a box.
    Box(TensorMap, Vec<i32>),
}

/// A copy and its issuer.
pub struct Pending {
    pub shared: u64,
    pub outside: Moved,
    pub way: Way<u64>,
    /// The warp and the lane that issued it.
    pub thread: (usize, usize),
    /// Clock of the issuer and line in the text at that time, if races are detected.
    pub asked: Option<(Clock, u32)>,
}
