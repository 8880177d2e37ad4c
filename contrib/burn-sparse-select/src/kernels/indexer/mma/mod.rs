//! Sums of pairs and their gradients on mma.sync, for GPUs of compute capability 8.0 and up. For bf16 and f16, whose products are exact in f32.
//!
//! ```text
//! tile        shape of a cube's work; which calls run on tensor cores
//! loads       copies to shared memory: keys once, queries step by step
//! sums        kernel and launch of the sums
//! gradients   kernel and launch of the gradients
//! ```

mod gradients;
mod loads;
mod sums;
mod tile;

pub use gradients::{GradientWork, launch_gradient};
pub use sums::launch;
pub use tile::{GradientTile, SumTile};
