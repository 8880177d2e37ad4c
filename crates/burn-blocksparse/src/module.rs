//! Burn's own functions, argument for argument: `use burn_blocksparse::module::attention` in place of `use burn::tensor::module::attention`.
//! `accelerate_attention` puts the kernels beneath Burn's own (features `wgpu` and `cuda`).

#[cfg(all(feature = "cube", feature = "fusion"))]
pub use crate::accelerated::{
    AcceleratedAttention, AttentionCall, accelerate_attention, accelerate_attention_with,
    accelerated_attention,
};
pub use crate::burn_attention::{attention, mask_layout, try_attention};
