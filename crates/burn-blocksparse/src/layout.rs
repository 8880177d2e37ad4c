//! Types for building layouts besides [`Pattern`](crate::Pattern): options, masks, padding.

pub use crate::choice::TopKOptions;
pub use crate::device_layout::DeviceLayoutOptions;
pub use blocksparse::{BLOCK_SIZES, BlockMask, LastUse, PaddingMask, PositionMask};
