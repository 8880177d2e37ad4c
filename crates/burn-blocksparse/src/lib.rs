//! Block-sparse attention for [Burn](burn): exact softmax attention over just the allowed
//! (query, key) pairs, forward and backward, on Burn's Flex, NdArray, WGPU and CUDA backends.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_blocksparse::{Pattern, sparse_attention};
//!
//! let device = Device::flex().autodiff();
//! // [batch, heads, seq, head_dim]
//! let [q, k, v] = [(); 3].map(|_| {
//!     Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &device).require_grad()
//! });
//! // The Sparse Transformer's fixed pattern in 32-wide blocks, built once and reused.
//! let layout = Pattern::fixed(128, 32).layout(2, 256, 32)?;
//! let out = sparse_attention(q.clone(), k, v, &layout)?;
//! let gradients = out.sum().backward();
//! assert_eq!(q.grad(&gradients).unwrap().dims(), [1, 2, 256, 16]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Which item for which job
//! | job | item |
//! |---|---|
//! | attention over a pattern, a mask or custom blocks | [`sparse_attention`], [`Pattern`], [`BlockLayout`], [`DeviceLayout`] |
//! | Burn's `attention`, with a fused backward pass | [`module`] |
//! | biases, sinks, ALiBi, softcap, dropout | [`AttentionOptions`], [`AttentionTensors`] |
//! | which implementation a call runs, and why | [`AttentionPlan`] |
//! | padding, block masks | [`layout`] |
//! | keys selected by content: top-k, MoBA, Quest, NSA, DSA, custom scores | the crate `burn-sparse-select` |
//! | decoding from a paged KV cache, sampling | the crate `burn-paged-attention` |
//! | linear layers, dense or block-sparse, norms, MLP, embedding, loss, AdamW | the crate `burn-fused-ops` |
//! | one sequence over several devices | [`ShardPlan`], [`SequenceShard`] |
//! | one process per device | [`Processes`] |
//! | CUDA graphs | [`graph`] |
//! | second derivatives | [`gradients`] |
//! | backend traits | [`backend`] |
//!
//! # Features
//! | feature | | default |
//! |---|---|---|
//! | `flex`, `ndarray` | CPU backends, which run the reference implementation | `flex` |
//! | `wgpu`, `cuda` | GPU backends, which run the kernels; with `fusion` | |
//! | `cube` | the kernels for another CubeCL backend of Burn (untested); `burn` must have that backend's feature, otherwise it does not compile | |
//! | `fusion` | Burn's fusion, which `burn`'s own default features turn on for GPU backends | |
//! | `autodiff` | gradients | yes |
//! | `draw` | layouts as PNG and SVG | |
//!
//! An application must enable the backend **here** as well as in `burn`. For a device whose feature is off in this crate, every function returns
//! [`OpError::Backend`], which names the feature. [`check_device`] checks whether a device can be used before any tensor is created.
//!
//! ## Effects of `cuda` on the whole application
//! CubeCL compiles CUDA kernels with LLVM, or as CUDA C++ with NVRTC. The tensor-core kernels need NVRTC, so `cuda` enables the feature `cpp` of
//! `cubecl-cuda`. Cargo unifies features, so **all** CubeCL kernels of the application, including Burn's own, are then compiled by NVRTC. The target machine
//! needs the CUDA toolkit (NVRTC and the headers under `CUDA_PATH`), not just the driver, and caches of compiled kernels start empty.
#![recursion_limit = "256"]
#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]
// Without a backend the macro's expansion of the backend traits has no arm that uses the arguments.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(unused_variables)
)]
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

#[cfg(all(feature = "cube", feature = "fusion"))]
mod accelerated;
mod attention;
mod attention_sums;
pub mod backend;
mod base;
mod blocks;
mod burn_attention;
mod call_layout;
mod check;
mod choice;
mod device_layout;
mod error;
pub mod gradients;
pub mod graph;
#[doc(hidden)]
pub mod internal;
pub mod layout;
mod merge;
pub mod module;
mod options;
mod processes;
mod rows;
mod sharded;
mod upload;
mod weights;

pub use attention::plan::AttentionPlan;
pub use attention::tensors::AttentionTensors;
pub use attention::{SparseAttentionCall, SparseAttentionOutput, sparse_attention};
pub use attention_sums::{
    AccumulatedAttention, AccumulatedAttentionOptions, accumulated_attention,
};
pub use base::device::{check_collectives, check_device};
pub use base::op_plan::OpPlan;
pub use blocksparse::{
    BlockLayout, Dropout, LayoutError, LayoutShape, Pattern, ProductPrecision, Seed, ShardPlan,
};
pub use call_layout::Layout;
pub use device_layout::DeviceLayout;
pub use error::OpError;
pub use merge::merge_attention;
pub use options::{AttentionOptions, WeightsMode, alibi_slopes};
pub use processes::{Message, Processes};
pub use sharded::{Exchange, SequenceShard};
pub use weights::BlockSparseTensor;
