//! Training ops beside attention: linear layers, normalisation, MLP, embedding, loss, dropout, and products of attention's
//! heads. Each is one function with its gradients; its `*_plan` says what would run and why.
//!
//! | job | functions |
//! |---|---|
//! | linear layers | [`linear`], [`fused_linear`], [`qkv_proj`], [`out_proj`] |
//! | heads | [`split_heads`], [`join_heads`] |
//! | MLP | [`mlp`], [`bias_activation`] |
//! | normalisation and residuals | [`norm`], [`add_norm`], [`residual_add`], [`dropout()`] |
//! | embedding and loss | [`embedding`], [`linear_cross_entropy`] |

pub use crate::activation::{Activation, bias_activation};
pub use crate::dropout::dropout;
pub use crate::embedding::{embedding, embedding_backward};
pub use crate::heads::{join_heads, split_heads};
#[cfg(all(feature = "cube", feature = "fusion"))]
pub use crate::linear::matmul::{accelerate_matmul, accelerated_products};
pub use crate::linear::{LinearOptions, fused_linear, linear};
pub use crate::loss::{CrossEntropyOptions, Reduction, linear_cross_entropy};
pub use crate::mlp::{MlpOptions, MlpParams, mlp};
pub use crate::norm::{
    AddNormOptions, NormKind, NormParams, Residual, add_norm, norm, residual_add,
};
pub use crate::op_plan::OpPlan;
pub use crate::projection::{out_proj, qkv_proj};
pub use blocksparse::ElementDropout;
