//! Page allocator and block tables of a KV cache: the page and slot of each key of each sequence.
//!
//! A [`PagePool`] holds no tensors. It decides where the keys of new tokens are written ([`Writes`]), which pages have to be copied before that, and
//! what kernels read ([`Tables`], and the visibility of slots). A *page* is a number of slots, each of which holds one key and value of one *table
//! row*: of one KV head, or of all KV heads of a layer if these retain the same keys. Sequences join and leave, share pages after a fork, and free
//! the keys that no later query attends to, by the [`Pattern`](blocksparse::Pattern) of the pool.
//!
//! # Regions
//! The last query of a key is known when the key is written. A key that every later query may attend to goes into the *permanent* region of its
//! table row, any other into the *timed* region, a list of pages that is filled at one end and freed at the other. With every pattern but random
//! blocks, keys die in the order in which they come, so pages die whole and no key is moved. (With random blocks a key waits until those before it
//! are dead.) Keys that no query attends to are not stored. So a table row has no more slots than its live keys, the tokens of a call and of the
//! rollback, and a part of a page at both ends of the timed region and at the end of the permanent one.
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

/// Last query of a key that every later query may attend to.
pub const ALWAYS: i32 = i32::MAX;

/// Last query of a key that no query attends to.
pub const NEVER: i32 = -1;
