//! Experimental: DeepSeek sparse attention (DSA: DeepSeek-V3.2-Exp, 2025, §2), with an indexer that learns which keys to choose.

// config      configuration and its text form
// stage       training stage: dense attention, the indexer's warm-up, or sparse attention
// indexer     queries, keys and weights of the indexer
// indexed     common parts of layers with an indexer
// heads       the choice, attention to it, and the indexer's loss

mod config;
pub(crate) mod heads;
pub(crate) mod indexed;
mod indexer;
mod stage;

pub use config::DsaHeadsConfig;
pub use heads::DsaHeads;
pub use indexer::DsaIndexer;
pub use stage::DsaStage;
