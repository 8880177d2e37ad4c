//! Burn's own functions, argument for argument: `use burn_blocksparse::module::attention` in place of `use burn::tensor::module::attention`.

#[cfg(all(feature = "cube", feature = "fusion"))]
pub use crate::accelerate::{
    AcceleratedAttention, AttentionCall, accelerate_attention, accelerate_attention_with,
    accelerated_attention,
};
pub use crate::burn_attention::{attention, mask_layout, try_attention};
