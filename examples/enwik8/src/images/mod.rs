//! Pictures as sequences of bytes (Child et al., 2019, §7): a start token that says the class, and then the bytes of every
//! pixel, row by row.

pub mod format;
pub mod grid;
pub mod sample;
mod synthetic;
