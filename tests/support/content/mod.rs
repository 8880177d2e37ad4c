//! Sorts, hashes and clusters, by which layers choose keys.

pub mod attracted;
pub mod dense;
pub mod order;
pub mod rounds;
