//! Definitions that the kernels of `blocksparse-cubecl` share with this crate.

pub use crate::dropout::{MULTIPLIERS, ROUNDS, WEYL, last_kept};
pub use crate::known::{Recent, Slots};
pub use crate::layout::TALLEST;
pub use crate::pattern::Repeat;
pub use crate::quantization::SMALLEST;
pub use crate::rule::{LARGEST, WHOLE, parts_of};
pub use crate::seed::{Read, SLOTS, keep_on_device, read_place};
pub use crate::stream_dropout::STREAM;
