//! CUDA graphs: a computation is captured once and replayed as one launch, with inputs that are overwritten in place.
#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
mod backend;
mod fixed;
pub mod ops;
#[doc(hidden)]
pub mod recording;
mod replayed;
pub mod seeds;

pub use blocksparse::SeedTable;

pub use fixed::{StaticInput, StaticInputKind};
pub use recording::ensure_not_capturing;
pub use replayed::CapturedGraph;
pub use seeds::DeviceSeed;
