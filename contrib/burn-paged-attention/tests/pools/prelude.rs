//! The names that most of these tests use.
#![allow(unused_imports)]

pub use std::ops::ControlFlow;

pub use burn_paged_attention::PoolError;
pub use burn_paged_attention::generate::{GenerateOptions, PromptLookup, Sampling, generate};
pub use burn_paged_attention::pool::{
    CacheError, EvictionConfig, KvDtype, KvPool, KvPoolConfig, KvRetention, KvStep, PagedDecoder,
    SequenceId,
};

pub use crate::common::*;

/// A pool of a model, and a sequence in it.
pub fn joined(model: &impl PagedDecoder, config: &KvPoolConfig) -> (KvPool, SequenceId) {
    let mut pool = model.new_pool(config).unwrap();
    let id = pool.join().unwrap();
    (pool, id)
}

/// The last keys, and the first ones.
pub const fn window(window: usize, sinks: usize) -> KvRetention {
    KvRetention::Window { window, sinks }
}
