//! Weights of other programs, with results of those: PyTorch's files, GPT-2 and Longformer of `transformers`, and llama.cpp's files.
//! `tests/data/weights/make.py` made the files.

#[macro_use]
#[path = "../../../blocksparse/tests/all/refused.rs"]
mod refused;

mod errors;
mod gguf;
mod gguf_writer;
mod llama;
mod models;
mod own;
mod support;
