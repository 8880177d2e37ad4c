//! The layers against burn-nn's, against references and against themselves in pieces.

#[path = "../common/mod.rs"]
mod common;
#[macro_use]
#[path = "../../../blocksparse/tests/all/refused.rs"]
mod refused;
mod golden;

mod attention;
mod block_sparse;
mod config;
mod content;
mod convert;
mod decoding;
mod dsa;
mod encoder;
mod heads;
mod linear;
mod llama;
mod longformer;
mod lsh;
mod msa;
mod nsa;
mod options;
mod packed;
mod robustness;
mod routing;
mod selection;
mod sharing;
mod sparse_attention;
mod transformer;
mod whole_layers;
