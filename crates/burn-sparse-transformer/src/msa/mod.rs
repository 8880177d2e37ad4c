//! Experimental: MiniMax sparse attention (MSA: MiniMax, 2026, arXiv 2606.13392), an index branch that learns which blocks of keys to choose.

// config      its numbers, also as text
// heads       the index branch, the choice, attention over it, and what the branch learns by

mod config;
pub(crate) mod heads;

pub use config::MsaHeadsConfig;
pub use heads::MsaHeads;
