//! Experimental: MiniMax sparse attention (MSA: MiniMax, 2026, arXiv 2606.13392), an index branch that learns which blocks of keys to choose.

// config      configuration and its text form
// heads       index branch, choice, attention to it, and the branch's loss

mod config;
pub(crate) mod heads;

pub use config::MsaHeadsConfig;
pub use heads::MsaHeads;
