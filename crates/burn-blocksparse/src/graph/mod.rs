//! CUDA graphs: a computation is captured once and replayed as one launch, on inputs that are overwritten in place.
pub(crate) mod backend;
pub(crate) mod ops;

mod fixed;
pub(crate) mod recording;
mod replayed;
pub(crate) mod seeds;

pub use blocksparse::SeedTable;

pub use fixed::{StaticInput, StaticInputKind};
pub use recording::ensure_not_capturing;
pub use replayed::CapturedGraph;
pub use seeds::DeviceSeed;
