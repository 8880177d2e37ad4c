//! Helpers of the sister crates and of tests. Nothing here is stable.

pub use crate::attention::kept::attention_from_residuals;
pub use crate::attention::kept::attention_with_residuals;
pub use crate::attention::kept::values::AttentionResiduals;
pub use crate::graph::seeds::prepare_seed;
pub use crate::heads::apart::{cat_head_groups, split_head_groups};
pub use crate::kernels_run::runs_kernels;
pub use crate::merge::merge_gathered_attention;
pub use crate::order::{
    ArgsortRounds, TopKPerCentroid, TopKRows, argmax_rows, counting_argsort,
    counting_argsort_rounds, lsh_argsort, lsh_hash, topk_per_centroid, topk_rows,
};
pub use crate::paged::choice::topk_pages;
pub use crate::rows::{gather_qkv, gather_rows, l2_normalize, segment_mean, segment_sum};
pub use crate::selection::layouts::LayoutCache;
pub use crate::sums::sum_all;
#[cfg(feature = "draw")]
pub use blocksparse::font;
pub use blocksparse::philox;
