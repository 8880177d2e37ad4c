//! Sorts, hashes and clusters, by which layers choose keys.

pub mod dense;
pub mod order;
