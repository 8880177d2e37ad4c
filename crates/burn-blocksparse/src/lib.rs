//! Block-sparse attention for [Burn](burn): exact softmax attention over just the allowed
//! (query, key) pairs, forward and backward, on Burn's Flex, NdArray, WGPU and CUDA backends.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_blocksparse::{AttentionOptions, Pattern, attention};
//!
//! let device = Device::flex().autodiff();
//! // [batch, heads, seq, head_dim]
//! let [q, k, v] = [(); 3].map(|_| {
//!     Tensor::<4>::random([1, 2, 256, 16], Distribution::Default, &device).require_grad()
//! });
//! // The Sparse Transformer's fixed pattern in 32-wide blocks, built once and reused.
//! let layout = Pattern::fixed(128, 32).layout(2, 256, 32)?;
//! let out = attention(q.clone(), k, v, &layout, AttentionOptions::default())?;
//! let gradients = out.sum().backward();
//! assert_eq!(q.grad(&gradients).unwrap().dims(), [1, 2, 256, 16]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//! | feature | | default |
//! |---|---|---|
//! | `flex`, `ndarray` | CPU backends, which run the reference implementation | `flex` |
//! | `wgpu`, `cuda` | GPU backends, which run the kernels; with `fusion` | |
//! | `cube` | the kernels for another CubeCL backend of Burn, which the application enables (untested) | |
//! | `fusion` | Burn's fusion, which `burn`'s own default features turn on for GPU backends | |
//! | `autodiff` | gradients | yes |
//! | `draw` | layouts as PNG and SVG | yes |
//!
//! An application must enable the backend **here** as well as in `burn`: a device whose feature is off
//! in this crate makes the call panic in Burn's dispatch.
#![recursion_limit = "256"]
#![warn(missing_docs)]
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

mod attention;
mod backends;
mod blocks;
mod device_layout;
mod error;
mod masses;
mod merge;
mod ops;
mod options;
mod pack;
mod plan;
mod reference;
mod tensors;
mod top_k;
mod upload;
mod vertical_slash;
mod weights;

pub use attention::{attention, attention_with_lse, attention_with_weights};
pub use blocks::BlockSparseTensorOps;
#[cfg(feature = "draw")]
pub use blocksparse::font;
pub use blocksparse::{
    BLOCK_SIZES, BlockLayout, BlockMask, Dropout, LayoutError, LayoutShape, Pattern, Restriction,
};
pub use device_layout::{DeviceLayout, DeviceLayoutOptions, Layout};
pub use error::AttentionError;
pub use masses::{
    AttentionMassOps, AttentionMasses, MassInputs, MassOptions, MassOutput, attention_masses,
};
pub use merge::merge_attention;
pub use ops::{
    AttentionGrads, AttentionInputs, AttentionOutput, BlockChoice, BlockSparseOps, LayoutTensors,
    MaybeFloat, OutputGrads, Saved, WantedGrads,
};
pub use options::{AttentionOptions, ProductPrecision, WeightsMode, alibi_slopes};
pub use plan::AttentionPlan;
pub use tensors::{AttentionTensors, attention_with_tensors, attention_with_tensors_and_weights};
pub use top_k::{TopKOptions, top_k_blocks, top_k_blocks_on_device};
pub use vertical_slash::{vertical_slash_layout, vertical_slash_layout_async};
pub use weights::BlockSparseTensor;
