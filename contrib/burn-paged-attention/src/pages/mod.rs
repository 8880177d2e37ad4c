//! The books of a cache of keys and values in pages: which page and slot each key of each sequence lives in.
//!
//! A [`PagePool`] holds no tensors. It says where the keys of new tokens are written ([`Writes`]), which pages have to be copied before that, and
//! what the kernels are told ([`Tables`], and what single queries see of them). A *page* is a number of slots, each of which holds one key and value of one *table row*: of
//! one KV head, or of all KV heads of a layer where these keep the same keys. Sequences join and leave, share pages when one is forked
//! from another, and forget the keys that no later query attends to, by the [`Pattern`](blocksparse::Pattern) of the pool.
//!
//! # Regions
//! When a key is written its last query is known. A key that always has a later query goes into the *permanent* region of its table row, any
//! other one into the *timed* region, a list of pages that is filled at one end and freed at the other: for every pattern but random blocks keys die in
//! the order in which they come, so pages die whole and nothing is moved. (Among random blocks a key waits until those before it are dead.)
//! Keys that no query attends to are not stored. So the slots of a table row are at most its live keys, the tokens of a call and of the rollback, and a part
//! of a page at both ends of the timed region and at the end of the permanent one.
//!
//! ```
//! use blocksparse::Pattern;
//! use burn_paged_attention::pages::{PagePool, PoolConfig, KvRetention};
//!
//! let config = PoolConfig::new(8).with_page_size(16).with_pattern(Pattern::local(20), 4, 2);
//! let mut pool = PagePool::new(config)?;
//! let sequence = pool.join(KvRetention::Reachable)?;
//! for _ in 0..1000 {
//!     let writes = pool.append(sequence, 1)?;
//!     assert!(writes.slot(0, 0).is_some() && writes.copies.is_empty());
//! }
//! // The next query sees 19 earlier keys.
//! assert_eq!(pool.usage(sequence)?.live, 19);
//! assert!(pool.usage(sequence)?.pages <= 3);
//! # Ok::<(), burn_paged_attention::pages::CacheError>(())
//! ```

mod append;
mod config;
mod error;
mod eviction;
mod known;
mod lifetimes;
mod pool;
mod prefix;
mod region;
mod retain;
mod saved;
mod sequence;
mod tables;
mod verify;
mod writes;

pub use append::Step;
pub use config::{KvRetention, PoolConfig};
pub use error::CacheError;
pub use eviction::{
    EvictionBudget, EvictionConfig, EvictionScore, ScoreSmoothing, adaptive, best, pooled_votes,
    pyramid_budgets,
};
pub use pool::{PagePool, SequenceId, Usage};
pub use retain::Retained;
pub use saved::SavedSequence;
pub use tables::Tables;
pub use writes::{PageCopy, Slot, SlotKey, TableChange, Writes};

/// The last query of a key that always has a later one.
pub const ALWAYS: i32 = i32::MAX;

/// The last query of a key that has none.
pub const NEVER: i32 = -1;
