//! Decoding over a paged KV cache for Burn.
//!
//! [`generate::generate`] continues prompts with any model that implements `Decoder` of `burn-sparse-transformer`. [`pool::KvPool`] holds the keys and values
//! of all its layers: continuous batching, forks, prefix reuse, eviction, int8 and fp8, selected pages, CUDA graphs.
//!
//! For layers of your own, [`append_rows`] writes a step's keys and values into pages, [`paged_attention`] attends to them ([`PagedKeysValues`]),
//! [`sampling`] draws tokens, and [`pages`] has the block tables: the page and slot of each key.
#![recursion_limit = "256"]
#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]
// What the macro makes of the backend traits has no arm then, which would use the arguments.
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
