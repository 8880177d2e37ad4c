//! The `mma` tier: mma.sync, ldmatrix and cp.async, on NVIDIA GPUs of compute capability 8.0 and up. For bf16, f16, and f32 through tf32 if that is asked
//! for.
//!
//! It covers what the `hopper` tier does not: other GPUs, other widths, residue classes of unequal lengths. Rows are gathered one by one, in pieces of 16
//! bytes, so blocks and listings can be arbitrary. In shared memory, rows of keys and values are an odd number of pieces apart. Scores and weights stay in
//! registers.

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

/// cp.async copies 16 bytes between addresses that are multiples of 16.
const PIECE: usize = 16;
