//! Computations that are recorded once and replayed.

mod fixed;
pub(crate) mod recording;
mod replayed;
pub(crate) mod seeds;

pub use fixed::{Fixed, FixedKind};
pub use recording::check_not_recording;
pub use replayed::Replayed;
pub use seeds::{DeviceSeed, prepare_seed};
