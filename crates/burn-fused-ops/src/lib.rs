//! Fused training ops for Burn with their gradients, in few launches: norms, linear layers, MLP, embedding, loss and AdamW. This crate knows nothing of
//! attention.
//!
//! GPUs run kernels: products on tensor cores with fused epilogues, and one pass over rows. Other devices run Burn's own operations. The `explain` method on
//! an op's options says which.
#![recursion_limit = "256"]
#![warn(missing_docs)]
#![warn(clippy::undocumented_unsafe_blocks)]
// Without kernels the arguments of plans are unused. Without backends the macro generates no match arm from the backend traits.
#![cfg_attr(not(feature = "cube"), allow(unused_variables))]
#![allow(deprecated)] // Burn deprecates its NdArray backend; we serve it while it exists.

pub mod backend;
#[cfg(feature = "cube")]
mod by_kernels;
mod dropout;
mod embedding;
pub mod explain;
#[cfg(feature = "cube")]
#[doc(hidden)]
pub mod kernels;
mod linear;
mod loss;
mod norm;
pub mod optim;
mod rope;
pub mod sparse_linear;

pub use crate::dropout::dropout;
pub use crate::embedding::{embedding, embedding_backward};
pub use crate::linear::activation::{Activation, bias_activation};
pub use crate::linear::heads::{join_heads, split_heads};
#[cfg(all(feature = "cube", feature = "fusion"))]
pub use crate::linear::matmul::{accelerate_matmul, accelerated_products};
pub use crate::linear::mlp::{MlpOptions, MlpParams, mlp};
pub use crate::linear::projection::{out_proj, qkv_proj};
pub use crate::linear::{LinearOptions, fused_linear, gated_linear, linear};
pub use crate::loss::{CrossEntropyOptions, Reduction, linear_cross_entropy};
pub use crate::norm::{
    AddNormOptions, NormKind, NormParams, Residual, add_norm, norm, residual_add,
};
pub use crate::rope::{RopePositions, rope, rope_pair};
pub use blocksparse::ElementDropout;
pub use burn_blocksparse::internal::op_plan::OpPlan;
