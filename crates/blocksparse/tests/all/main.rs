//! The tests of the crate in one program.

mod attachments;
mod callbacks;
mod errors;
mod long_strides;
mod patterns;
mod plans;
mod reach;
mod robustness;
mod weights;
