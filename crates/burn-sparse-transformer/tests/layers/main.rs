//! The layers against burn-nn's, against a reference and against themselves in pieces.

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod block_sparse;
mod config;
mod convert;
mod decoding;
mod encoder;
mod generate;
mod heads;
mod linear;
mod longformer;
mod options;
mod packed;
mod robustness;
mod transformer;
