//! Decoding over a paged KV cache for Burn.
//!
//! [`generate::generate`] continues prompts with any model that implements `Decoder` of `burn-sparse-transformer`. [`pool::KvPool`] holds the keys and values
//! of all its layers: continuous batching, forks, prefix reuse, eviction, int8 and fp8, selected pages, CUDA graphs.
//!
//! For your own layers, [`append_rows`] writes a step's keys and values into pages, [`paged_attention`] attends to them ([`PagedKeysValues`]),
//! [`sampling`] samples tokens, and [`pages`] allocates pages and builds page tables.
#![recursion_limit = "256"]
#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]
// The macro expands the backend traits to no match arm then, so nothing uses the arguments.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(unused_variables)
)]
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

pub mod backend;
pub mod dsa;
mod error;
pub mod generate;
#[doc(hidden)]
pub mod internal;
#[cfg(feature = "cube")]
#[doc(hidden)]
pub mod kernels;
mod paged;
pub mod pages;
pub mod pool;
mod sample_options;
pub mod sampling;
pub mod summaries;

pub use error::PoolError;
pub use paged::{
    PagedKeysValues, PagedOptions, PagedOutput, PagedStore, PagedVisibility, Quantization,
    QuantizedPages, append_quantized, append_rows, dequantize, paged_attention,
};
