//! The tests of the crate in one program.

#[macro_use]
mod refused;

mod attachments;
mod callbacks;
mod errors;
mod long_strides;
mod parts;
mod patterns;
mod plans;
mod random_patterns;
mod reach;
mod robustness;
mod shards;
mod weights;
