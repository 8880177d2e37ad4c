//! Selection of keys that a cache of fixed size retains, if the pattern reaches all of them.
//!
//! Lossy: queries do not see evicted keys, which never return. Keys are selected per layer and KV head, by scores ([`EvictionScore`]) that the
//! caller computes; this module holds no tensors. Ties go to the later position; NaN is the lowest score.

mod choice;
mod config;

pub use choice::{adaptive, best, pooled_votes};
pub use config::{EvictionBudget, EvictionConfig, EvictionScore, ScoreSmoothing, pyramid_budgets};
