//! Helpers of the layers and of tests. Nothing here is stable.

pub use crate::order::{
    ArgsortRounds, TopKPerCentroid, TopKRows, argmax_rows, counting_argsort,
    counting_argsort_rounds, lsh_argsort, lsh_hash, topk_per_centroid, topk_rows,
};
pub use crate::selection::layouts::LayoutCache;
