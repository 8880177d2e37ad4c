//! Imports of most of these tests.
#![allow(unused_imports)]

pub use std::ops::ControlFlow;

pub use burn_paged_attention::PoolError;
pub use burn_paged_attention::generate::{GenerateOptions, PromptLookup, Sampling, generate};
pub use burn_paged_attention::pool::{
    CacheError, EvictionConfig, KvDtype, KvPool, KvPoolConfig, KvRetention, KvStep, PagedDecoder,
    SequenceId,
};

pub use crate::common::*;

/// Makes a pool of a model with a sequence.
pub fn joined(model: &impl PagedDecoder, config: &KvPoolConfig) -> (KvPool, SequenceId) {
    let mut pool = model.new_pool(config).unwrap();
    let id = pool.join().unwrap();
    (pool, id)
}

/// Makes a retention of the last keys and the first ones.
pub const fn window(window: usize, sinks: usize) -> KvRetention {
    KvRetention::Window { window, sinks }
}
