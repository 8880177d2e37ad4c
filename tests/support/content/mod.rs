//! Sorts, hashes and clusters, by which layers select keys.

pub mod dense;
pub mod order;
