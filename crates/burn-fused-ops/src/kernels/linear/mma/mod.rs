//! Products on mma.sync, for GPUs of compute capability 8.0 and up.
//!
//! ```text
//! tile       the shape of a cube's work
//! places     where numbers lie in shared memory
//! product    the kernel
//! ```

mod places;
pub mod product;
mod tile;

pub use tile::{MmaTile, VARIANTS};
