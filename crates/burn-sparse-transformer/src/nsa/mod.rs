//! Experimental: native sparse attention (NSA: Yuan et al., 2025), heads with compressed, selected and window branches.

// config        its numbers, also as text
// compression   what makes one key or value of a block of them
// heads         projections of the branches, gates, and attention
// cache         what they keep of earlier tokens
// mixed         in the place of a layer's pattern

mod cache;
mod compression;
mod config;
pub(crate) mod heads;
mod mixed;

pub(crate) use cache::BranchCaches;
pub use compression::{Compression, NsaCompressor};
pub use config::NsaHeadsConfig;
pub use heads::{NsaHeads, NsaProjections};
