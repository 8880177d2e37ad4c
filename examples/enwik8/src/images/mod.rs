//! Images as sequences of bytes (Child et al., 2019, §7): a start token for the class, then the bytes of every pixel, row by row.

pub mod format;
pub mod grid;
pub mod sample;
mod synthetic;
