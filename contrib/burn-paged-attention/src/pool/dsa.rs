//! DeepSeek and MiniMax sparse attention in a pool: storage of their indexers' keys.
//!
//! An indexer's keys are in pages of the same table as the keys and values, so forks, rollbacks and prefix reuse work for them by the block tables.
//! After a prompt, a step reads all of an indexer's keys, and the selected ones of the others.

use burn::tensor::Device;
use burn_sparse_transformer::content::ContentAttention;
use burn_sparse_transformer::internal::ensure_none;
use burn_sparse_transformer::{SparseMultiHeadAttention, TransformerError};

use super::store::{Store, Stored, lost};
use super::{Group, KvPoolConfig, KvUsage};
use crate::PoolError;
use crate::pages::SequenceId;

/// Checks that the configuration fits the layer, which errors call `name`.
pub(super) fn check(name: &str, config: &KvPoolConfig) -> Result<(), TransformerError> {
    let expected = format!("none with {name}, whose tokens all choose their keys");
    ensure_none("choosing_prompts", config.prompts_choose, &expected)?;
    let expected = format!("none with {name}, whose indexer chooses among all keys");
    ensure_none("eviction", config.eviction.is_some(), &expected)?;
    let expected = format!("All or Reachable with {name}, whose indexer chooses among all keys");
    config.ensure_no_window(expected)
}

/// Makes an empty store for the indexer's keys of a layer, if it has its own indexer. They are not rounded, because the selection depends on them.
pub(super) fn store(
    group: &Group,
    mha: &SparseMultiHeadAttention,
    device: &Device,
) -> Result<Option<Store>, TransformerError> {
    let (width, dtype) = match (mha.choosing_dsa(), mha.choosing_msa()) {
        (Some(dsa), _) => (dsa.config().index_dim, dsa.indexer.dtype()),
        (None, Some(msa)) => (msa.config().index_dim, msa.dtype()),
        (None, None) => return Ok(None),
    };
    let heads = group.key.kv_heads / group.books.table_rows();
    let [pages, page_size] = group.pages();
    let (pages, stored) = ([pages / heads, page_size], Stored::Float(dtype));
    Store::new(pages, 1, [width, NO_VALUES], device, stored).map(Some)
}

/// Width of the unused values in an indexer's store.
pub(super) const NO_VALUES: usize = 4;

/// Adds the memory of an indexer's keys, and subtracts the keys and values that are not read.
pub(super) fn add_usage(
    group: &Group,
    (keys, index): (&Store, Option<&Store>),
    id: SequenceId,
    usage: &mut KvUsage,
) -> Result<(), PoolError> {
    let Group { key, books, .. } = group;
    let tokens = books.len(id)?;
    // A layer that reuses a selection has no indexer.
    let bytes = index.map_or(0, Store::slot_bytes);
    usage.summary_bytes += books.usage(id)?.slots * bytes;
    let (kept, unread) = match &key.indexer {
        Some(ContentAttention::Dsa(dsa)) => (dsa.keep, tokens.saturating_sub(dsa.keep)),
        // The page selection accounts for what is not read.
        Some(ContentAttention::Msa(msa)) => (msa.block.saturating_mul(msa.keep), 0),
        _ => return Err(lost().into()),
    };
    if tokens > kept {
        usage.read_bytes += tokens * bytes;
    }
    let unread = unread * key.kv_heads * keys.slot_bytes();
    usage.read_bytes = usage.read_bytes.saturating_sub(unread);
    Ok(())
}
