//! Graph capture, and sampling.

pub mod decoding;
pub mod runs;
pub mod sampling;
pub mod training;
