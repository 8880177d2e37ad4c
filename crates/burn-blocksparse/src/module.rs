//! Drop-in replacements of Burn's functions: `use burn_blocksparse::module::attention` instead of `use burn::tensor::module::attention`.
//! `accelerate_attention` runs the kernels beneath Burn's own function (features `wgpu` and `cuda`).

#[cfg(all(feature = "cube", feature = "fusion"))]
pub use crate::accelerated::{
    AcceleratedAttention, AttentionCall, accelerate_attention, accelerate_attention_with,
    accelerated_attention,
};
pub use crate::burn_attention::{attention, mask_layout, try_attention};
