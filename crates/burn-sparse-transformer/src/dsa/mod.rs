//! Experimental: DeepSeek sparse attention (DSA: DeepSeek-V3.2-Exp, 2025, §2), an indexer that learns which keys to choose.

// config      its numbers, also as text
// stage       how far the training is: dense attention, the indexer's warm-up, or the choice
// indexer     what the indexer makes of tokens
// indexed     what layers with other indexers have in common with it, in the place of a pattern
// heads       the choice, attention over it, and the indexer's loss

mod config;
pub(crate) mod heads;
pub(crate) mod indexed;
mod indexer;
mod stage;

pub use config::DsaHeadsConfig;
pub use heads::DsaHeads;
pub use indexer::DsaIndexer;
pub use stage::DsaStage;
