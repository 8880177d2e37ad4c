//! Layers of DeepSeek sparse attention: what a pool holds of their indexers.
//!
//! An indexer's keys lie in pages of the same table as the keys and values, so what the books say holds for them, too: copies behind a fork, steps back, what is
//! known of a beginning. Behind a prompt a step reads all of an indexer's keys, and of the others those that are chosen.

use burn::tensor::Device;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::dsa::DsaHeads;
use burn_sparse_transformer::internal::{ensure, ensure_none};

use super::store::{Store, Stored, lost};
use super::{Group, KvPoolConfig, KvUsage};
use crate::PoolError;
use crate::pages::{KvRetention, SequenceId};

/// That a pool of a configuration can keep a layer's keys.
pub(super) fn check(config: &KvPoolConfig) -> Result<(), TransformerError> {
    let expected = "none with dsa, whose tokens all choose their keys";
    ensure_none("choosing_prompts", config.prompts_choose, expected)?;
    let expected = "none with dsa, whose indexer chooses among all keys";
    ensure_none("eviction", config.eviction.is_some(), expected)?;
    let is_window = matches!(config.residency, KvRetention::Window { .. });
    let got = format!("{:?}", config.residency);
    let expected = || "All or Reachable with dsa, whose indexer chooses among all keys".into();
    ensure(!is_window, "residency", expected, got)
}

/// An indexer's keys of a layer in a group, empty. They stay as exact as they are: what is chosen depends on them.
pub(super) fn store(
    group: &Group,
    dsa: &DsaHeads,
    device: &Device,
) -> Result<Store, TransformerError> {
    let heads = group.key.kv_heads / group.books.table_rows();
    let [pages, page_size] = group.pages();
    let widths = [dsa.config().index_dim, NO_VALUES];
    let stored = Stored::Float(dsa.indexer.dtype());
    Store::new([pages / heads, page_size], 1, widths, device, stored)
}

/// Width of the values that an indexer does not have, but a store does.
pub(super) const NO_VALUES: usize = 4;

/// Adds what a sequence takes of an indexer's keys, and takes away what is not read of the others.
pub(super) fn add_usage(
    group: &Group,
    [keys, index]: [&Store; 2],
    id: SequenceId,
    usage: &mut KvUsage,
) -> Result<(), PoolError> {
    let Group { key, books, .. } = group;
    let dsa = key.dsa.as_ref().ok_or_else(lost)?;
    let tokens = books.len(id)?;
    usage.summary_bytes += books.usage(id)?.slots * index.slot_bytes();
    usage.read_bytes += match tokens > dsa.keep {
        true => tokens * index.slot_bytes(),
        false => 0,
    };
    let unread = tokens.saturating_sub(dsa.keep) * key.kv_heads * keys.slot_bytes();
    usage.read_bytes = usage.read_bytes.saturating_sub(unread);
    Ok(())
}
