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
//! | attention over a pattern, a mask or blocks of your own | [`sparse_attention`], [`Pattern`], [`BlockLayout`], [`DeviceLayout`] |
//! | Burn's `attention`, with a fused backward pass | [`module`] |
//! | biases, sinks, ALiBi, softcap, dropout | [`AttentionOptions`], [`AttentionTensors`] |
//! | what a call runs, and why | [`AttentionPlan`] |
//! | padding, masks of blocks | [`layout`] |
//! | keys selected by content: top-k, MoBA, Quest, NSA, DSA, your own scores | the crate `burn-sparse-select` |
//! | decoding from a paged KV cache, sampling | the crate `burn-paged-attention` |
//! | linear layers, dense or block-sparse, norms, MLP, embedding, loss, AdamW | the crate `burn-fused-ops` |
//! | one sequence over several devices | [`ShardPlan`], [`SequenceShard`] |
//! | a process for each device | [`Processes`] |
//! | CUDA graphs | [`graph`] |
//! | gradients that are differentiated again | [`gradients`] |
//! | backend traits | [`backend`] |
//!
//! # Features
//! | feature | | default |
//! |---|---|---|
//! | `flex`, `ndarray` | CPU backends, which run the reference implementation | `flex` |
//! | `wgpu`, `cuda` | GPU backends, which run the kernels; with `fusion` | |
//! | `cube` | the kernels for another CubeCL backend of Burn (untested); `burn` must have that backend's feature, it does not compile without one | |
//! | `fusion` | Burn's fusion, which `burn`'s own default features turn on for GPU backends | |
//! | `autodiff` | gradients | yes |
//! | `draw` | layouts as PNG and SVG | |
//!
//! An application must enable the backend **here** as well as in `burn`: for a device whose feature is off in this crate every function returns
//! [`OpError::Backend`], which names the feature. [`check_device`] checks before any tensor is made whether a device can be used.
//!
//! ## What `cuda` changes for the whole application
//! CubeCL compiles CUDA kernels by LLVM or by CUDA C++ and NVRTC. The tensor-core kernels need the second, so `cuda` turns on the feature `cpp` of
//! `cubecl-cuda`. Cargo unites features, so then **all** CubeCL kernels of the application, also Burn's own, are compiled by NVRTC: the machine it runs on
//! needs the CUDA toolkit (NVRTC and the headers under `CUDA_PATH`), not just the driver, and caches of compiled kernels begin anew.
#![recursion_limit = "256"]
#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]
// What the macro makes of the backend traits has no arm then, which would use the arguments.
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
