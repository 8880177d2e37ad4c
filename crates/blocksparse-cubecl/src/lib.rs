//! Block-sparse attention in CubeCL kernels, on any CubeCL runtime.
//!
//! ```text
//! forward     s = scale · q · kᵀ    p = softmax(s)    out = p · v          lse = ln Σ exp(s)
//! backward    delta = rowsum(dO ∘ O) − dlse           p = exp(s − lse)
//!             dp = dO · vᵀ          ds = p ∘ (dp − delta) · scale
//!             dQ = ds · k           dK = dsᵀ · q       dV = pᵀ · dO
//! ```
//!
//! Only the pairs in the layout's blocks are computed. In the forward and dQ kernels, a cube has a tile of queries and reads the keys they attend to. In
//! the dK/dV kernel, a cube has a tile of keys and reads the queries that attend to them. There, every output element has one writer. In a fused backward
//! pass, several tiles of keys add to the same dQ, in f32 and in an order that the plan fixes. So the same input gives the same bits. Only integer counts
//! use atomics in arbitrary order. [`plan`](blocksparse::plan) describes the tiles of a cube.
//!
//! A call is a [`Request`] over a layout. [`AttentionPlan`] has the kernels it runs, chosen from the layout, the request and the device, and can be
//! printed. Nothing falls back silently: a call that cannot run returns a [`KernelError`] before anything is launched.
//!
//! ```text
//! call       a call as data: views, Request, ScoreKind        error      errors of calls
//! args       kernel arguments: buffers, strides, scalars      uploaded   plans and slopes on a device
//! pass       a pass over a layout, the input of tiers         device     launch plans on devices
//! tier       the tiers as values, in order of preference      stats      lse and delta of queries
//! choice     AttentionPlan                                    on_device  launch plans made on a device
//! tuning     environment variables                            shared     code of several tiers' kernels
//! forward, backward, attention_sums                           simt, mma, hopper: the tiers
//! primitives radix select                                    prelude    imports of launchers
//! ```
//!
//! [`rows`] has gathers by an index and merges by lse. Kernels of training ops, page tables and choices by content are in the crates of those, built on
//! this crate's hidden modules.

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
pub mod prelude;
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
