//! The `hopper` tier: wgmma and TMA, bf16 and f16, on GPUs of compute capability 9.0.
//!
//! TMA gathers the keys and values of a step, with one box of `group` rows per entry, contiguously in shared memory. The 128-byte swizzle repeats after 8
//! rows, so boxes of 8, 16, … rows form the layout that wgmma reads. If head_dim is not a multiple of 64, TMA pads it with zeros, in shared memory only. If
//! positions are listed by residue class, tensor maps have the class as a dimension, so that a box is strided in memory.

mod backward;
mod backward_chain;
mod backward_loads;
mod backward_stats;
mod balance;
mod base;
mod bias_gradient;
mod bias_kept;
mod bias_launch;
mod bias_store;
mod bits;
mod choose;
mod coarse;
mod dropout;
mod forward;
mod forward_loads;
mod fp8;
mod fused;
mod gradient;
mod launch;
mod long_tiles;
mod mainloop_cube;
mod mainloop_loads;
mod mainloop_tile;
mod mainloops;
mod maps;
mod options;
#[doc(hidden)]
pub mod output;
mod pair_tile;
#[doc(hidden)]
pub mod rows;
mod score_gradient;
mod shapes;
mod shares;
#[doc(hidden)]
pub mod softmax;
mod step;
mod tiles;
mod wide;

pub use bias_launch::{BiasTiles, launch_bias_keys, launch_bias_pairs};
pub use choose::{Backward, choose, choose_backward, choose_bias, choose_fp8};
pub use fused::{MOST_REACH, Stats, launch_fused};
pub use launch::{launch_forward, launch_mainloops};
pub use long_tiles::MainloopPlan;
pub use tiles::{BackwardTile, Tile};
