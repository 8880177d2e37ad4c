//! Block-sparse attention in CubeCL kernels, on any CubeCL runtime.
//!
//! ```text
//! forward     s = scale · q · kᵀ    p = softmax(s)    out = p · v          lse = ln Σ exp(s)
//! backward    delta = rowsum(dO ∘ O) − dlse           p = exp(s − lse)
//!             dp = dO · vᵀ          ds = p ∘ (dp − delta) · scale
//!             dQ = ds · k           dK = dsᵀ · q       dV = pᵀ · dO
//! ```
//!
//! Only the pairs in kept blocks are computed. The forward and the dQ kernel give a cube a tile of
//! queries, which reads the keys it needs; the dK/dV kernel gives it a tile of keys, which reads the queries that need
//! them: there every number has one writer. A fused backward pass has several for dQ: tiles of keys add their parts to sums in f32, in an order that the
//! plan fixes. So the same input gives the same bits. Atomics in no order count whole numbers alone. [`plan`](blocksparse::plan) says what a cube computes.
//!
//! A call is a [`Request`] over a layout. [`AttentionPlan`] is what it will run, chosen from the layout, the request and the device; it
//! prints. Nothing falls back silently: what cannot run is a [`KernelError`] before anything is launched.
//!
//! [`rows`] are rows by an index and merges by lse. Kernels of training ops, of pages and of choices by content stand in the crates of those, on the
//! hidden modules of this one.

#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]

#[doc(hidden)]
pub mod arch;
#[doc(hidden)]
pub mod args;
#[doc(hidden)]
pub mod attention_sums;
mod backward;
#[doc(hidden)]
pub mod call;
#[doc(hidden)]
pub mod choice;
#[doc(hidden)]
pub mod described;
mod device;
#[doc(hidden)]
pub mod device_key;
#[doc(hidden)]
pub mod error;
mod forward;
#[doc(hidden)]
pub mod hopper;
#[doc(hidden)]
pub mod limits;
#[doc(hidden)]
pub mod mma;
#[doc(hidden)]
pub mod on_device;
mod pass;
#[doc(hidden)]
pub mod primitives;
pub mod recording;
pub mod rows;
pub mod seeds;
#[doc(hidden)]
pub mod shared;
#[doc(hidden)]
pub mod simt;
#[doc(hidden)]
pub mod slices;
#[doc(hidden)]
pub mod stats;
#[doc(hidden)]
pub mod tensor;
#[cfg(test)]
mod tests;
#[doc(hidden)]
pub mod tier;
#[doc(hidden)]
pub mod tuning;
mod uploaded;

pub use args::ScoreOptions;
pub use attention_sums::{AttentionSumOutputs, attention_sums, check_attention_sums};
pub use backward::backward;
pub use call::{
    BiasView, Gradients, OutputGrads, Outputs, Readable, Request, ScoreKind, TableView, TensorView,
};
pub use choice::AttentionPlan;
pub use error::KernelError;
pub use forward::forward;
pub use on_device::{
    ChoiceTensor, KeyListSizes, ListBuffers, ListSizes, ScoredRows, choose_blocks, count_blocks,
    highest_blocks, list_queries, unique_keys,
};
pub use tuning::{ListedWay, TierLimit, Tuning, TuningError};
