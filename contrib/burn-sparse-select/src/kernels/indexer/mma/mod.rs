//! Sums of pairs and their gradients on mma.sync, for GPUs of compute capability 8.0 and up. For bf16 and f16, whose products are exact in f32.
//!
//! ```text
//! tile            the shape of a cube's work, and whether tensor cores take a call
//! loads           what is copied to shared memory: keys once, queries step by step
//! sums            the kernel of sums, and its launch
//! gradients       the kernel of the gradients, and its launch
//! ```

mod gradients;
mod loads;
mod sums;
mod tile;

pub use gradients::{GradientWork, launch_gradient};
pub use sums::launch;
pub use tile::{GradientTile, SumTile};
