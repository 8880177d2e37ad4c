//! CUDA graphs: a computation is captured once and replayed as one launch, on inputs that are overwritten in place.

mod fixed;
pub(crate) mod recording;
mod replayed;
pub(crate) mod seeds;

pub use blocksparse::SeedTable;

pub use fixed::{Fixed, FixedKind};
pub use recording::check_not_recording;
pub use replayed::Replayed;
pub use seeds::DeviceSeed;
