//! The tests of the crate in one program.

mod attachments;
mod callbacks;
mod errors;
mod eviction;
mod long_strides;
mod pages;
mod pages_errors;
mod pages_eviction;
mod pages_known;
mod pages_machine;
mod pages_rows;
mod parts;
mod patterns;
mod plans;
mod reach;
mod robustness;
mod weights;
