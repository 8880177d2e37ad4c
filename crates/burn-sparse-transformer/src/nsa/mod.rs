//! Experimental: native sparse attention (NSA: Yuan et al., 2025), heads with compressed, selected and window branches.

// config        configuration and its text form
// compression   compression of a block of keys or values
// heads         projections of the branches, gates, and attention
// cache         keys and values of earlier tokens
// mixed         use in place of a layer's pattern

mod cache;
mod compression;
mod config;
pub(crate) mod heads;
mod mixed;

pub(crate) use cache::BranchCaches;
pub use compression::{Compression, NsaCompressor};
pub use config::NsaHeadsConfig;
pub use heads::{NsaHeads, NsaProjections};
