//! The tests of the crate in one program.

mod attachments;
mod errors;
mod long_strides;
mod patterns;
mod robustness;
