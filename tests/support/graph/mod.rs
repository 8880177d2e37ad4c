//! Recordings, and the tokens that decoding draws.

pub mod decoding;
pub mod runs;
pub mod sampling;
pub mod training;
