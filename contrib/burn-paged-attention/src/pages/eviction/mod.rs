//! Which keys a cache of a fixed size keeps, where a pattern reaches them all.
//!
//! Lossy: queries do not see what was evicted, and it never returns. Keys are chosen for each layer and KV head, by scores that the [`EvictionScore`]
//! says how to come by; this module holds no tensors and computes no scores, it chooses. Ties go to the later position, NaN is the lowest score.

mod choice;
mod config;

pub use choice::{adaptive, best, pooled_votes};
pub use config::{EvictionBudget, EvictionConfig, EvictionScore, ScoreSmoothing, pyramid_budgets};
