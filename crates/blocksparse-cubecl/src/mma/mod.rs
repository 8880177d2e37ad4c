//! The `mma` tier: mma.sync, ldmatrix and cp.async, on NVIDIA GPUs of compute capability 8.0 and up; bf16, f16, and f32 through tf32
//! where that is asked for.
//!
//! It takes what the `hopper` tier does not: other GPUs, other widths, classes of unequal lengths. Rows are
//! gathered one by one, in pieces of 16 bytes, so nothing is required of blocks and listings; keys and values lie in
//! shared memory with their rows an odd number of pieces apart. Scores and weights stay in registers.

#[doc(hidden)]
pub mod backward;
#[doc(hidden)]
pub mod backward_loads;
mod bias_gradient;
mod choose;
mod dropout;
#[doc(hidden)]
pub mod forward;
#[doc(hidden)]
pub mod gather;
mod launch;
#[doc(hidden)]
pub mod product;
mod score;
mod score_gradient;
#[doc(hidden)]
pub mod tile;

pub use choose::{choose, choose_backward, choose_bias_gradient};
pub use launch::{launch_backward, launch_bias_gradient, launch_forward};
pub use tile::{Tile, describe};

/// cp.async copies 16 bytes from and to multiples of 16 bytes.
const PIECE: usize = 16;
