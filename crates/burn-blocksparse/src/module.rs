//! Burn's own functions, argument for argument: `use burn_blocksparse::module::attention` in place of `use burn::tensor::module::attention`.

pub use crate::burn_attention::{attention, mask_layout, try_attention};
