//! Helpers of the sister crates and of tests. Nothing here is stable.

pub use crate::graph::seeds::prepare_seed;
pub use crate::heads::apart::{heads_apart, heads_together};
pub use crate::kept::values::KeptAttention;
pub use crate::kept::{attention_given, attention_keeping};
pub use crate::kernels_run::runs_kernels;
pub use crate::merge::merge_attention_at;
pub use crate::order::{
    AttractedRows, HighestInRows, TokensInRounds, attracted_rows, hash_rows, highest_in_rows,
    highest_rows, sort_buckets, sort_hashes, sort_rounds,
};
pub use crate::paged::choice::highest_pages;
pub use crate::rows::{keyed_rows_at, means_at, rows_at, sums_at, unit_rows};
pub use crate::selection::layouts::KeptLayouts;
pub use crate::sums::sum_all;
#[cfg(feature = "draw")]
pub use blocksparse::font;
pub use blocksparse::philox;
