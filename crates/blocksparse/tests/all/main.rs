//! The tests of the crate in one program.

mod attachments;
mod errors;
mod patterns;
mod robustness;
