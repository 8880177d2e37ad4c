//! Native sparse attention in a pool: storage of its branches, and decoding.
//!
//! ```text
//! selected     all keys, in pages by the layer's pattern, which is causal
//! compressed   one pair every stride, in pages of the same table: a page of P tokens has P / stride, each by the last token of its block
//! window       the last keys of the window, in pages of a local pattern
//! tokens       the last ones of a block, from which the next pair is made, in pages of another
//! ```
//!
//! Thus forks, rollbacks and prefix reuse work for all branches by the block tables.

use burn::tensor::{Device, FloatDType};
use burn_blocksparse::Pattern;
use burn_sparse_select::pages::PageChoice;
use burn_sparse_transformer::internal::ensure_none;
use burn_sparse_transformer::nsa::{NsaHeads, NsaHeadsConfig};
use burn_sparse_transformer::{SparseMultiHeadAttention, TransformerError};

use super::nsa_step::BranchGroups;
use super::step::GroupKey;
use super::store::{Store, Stored, lost};
use super::{Group, KvPoolConfig, KvUsage};
use crate::PoolError;
use crate::pages::SequenceId;

/// Storage of a layer besides the keys and values of the selected branch.
#[derive(Debug)]
pub(super) struct Branches {
    /// Compressed pairs.
    pub entries: Store,
    /// Tokens for the next compression.
    pub tokens: Store,
    pub window: Option<Store>,
    /// True if the branches have their own keys and values.
    own: bool,
}

/// Returns a layer's page selection.
pub(super) fn choice(
    nsa: &NsaHeads,
    config: &KvPoolConfig,
    page_size: usize,
) -> Result<PageChoice, TransformerError> {
    let expected = "none with nsa, whose tokens all choose their keys";
    ensure_none("choosing_prompts", config.prompts_choose, expected)?;
    let expected = "none with nsa, whose attention sums are those of all tokens";
    ensure_none("eviction", config.eviction.is_some(), expected)?;
    config.ensure_no_window("All or Reachable with nsa, which has a window of its own")?;
    Ok(nsa.op().on_pages(page_size)?)
}

/// Finds or makes the groups of the other branches of a layer's group.
pub(super) fn groups(
    groups: &mut Vec<Group>,
    mha: &SparseMultiHeadAttention,
    nsa: &NsaHeadsConfig,
    config: &KvPoolConfig,
) -> Result<BranchGroups, PoolError> {
    let mut near = |keys: usize| {
        let key = GroupKey {
            pattern: Pattern::local(keys),
            heads: mha.n_heads(),
            kv_heads: mha.n_kv_heads(),
            alibi: None,
            relative: None,
            selection: None,
            nsa: None,
            indexer: None,
        };
        match groups.iter().position(|group| group.key == key) {
            Some(at) => Ok(at),
            None => {
                groups.push(Group::new(key, None, config)?);
                Ok::<usize, PoolError>(groups.len() - 1)
            }
        }
    };
    Ok(BranchGroups {
        tokens: near(nsa.block)?,
        window: match nsa.window {
            0 => None,
            window => Some(near(window)?),
        },
    })
}

impl Branches {
    /// Makes the empty branches of a layer in the group `at`.
    pub(super) fn new(
        groups: &[Group],
        at: usize,
        mha: &SparseMultiHeadAttention,
        nsa: &NsaHeadsConfig,
        (stored, model): (Stored, FloatDType),
        device: &Device,
    ) -> Result<Self, TransformerError> {
        let of = groups[at].nsa.ok_or_else(lost)?;
        let store = |at: usize, of_slot: usize, stored: Stored| {
            let [pages, page_size] = groups[at].pages();
            let widths = mha.head_widths();
            let pages = [pages, page_size / of_slot];
            Store::new(pages, mha.n_kv_heads(), widths, device, stored)
        };
        Ok(Self {
            entries: store(at, nsa.stride, stored)?,
            // They are few, and compression inherits their rounding.
            tokens: store(of.tokens, 1, Stored::Float(model))?,
            window: match of.window {
                Some(at) => Some(store(at, 1, stored)?),
                None => None,
            },
            own: !nsa.shared_kv,
        })
    }

    /// Returns whether steps can be captured. Unpacking 8-bit elements needs uploaded constants, which cannot.
    pub(super) fn is_recordable(&self) -> bool {
        !self.entries.is_quantized()
    }

    /// Returns the bytes of all pages.
    pub(super) fn bytes(&self) -> usize {
        let window = self.window.as_ref().map_or(0, Store::bytes);
        self.entries.bytes() + self.tokens.bytes() + window
    }

    /// Adds the memory of a sequence in a layer of the group `at`.
    pub(super) fn add_usage(
        &self,
        groups: &[Group],
        at: usize,
        id: SequenceId,
        usage: &mut KvUsage,
    ) -> Result<(), PoolError> {
        let Group { key, books, .. } = &groups[at];
        let of = groups[at].nsa.ok_or_else(lost)?;
        let nsa = key.nsa.as_ref().ok_or_else(lost)?;
        let pairs = books.usage(id)?.slots / nsa.stride;
        usage.summary_bytes += pairs * key.kv_heads * self.entries.slot_bytes();
        let pairs = nsa.entries(books.len(id)?);
        usage.read_bytes += pairs * key.kv_heads * self.entries.slot_bytes();
        let window = of.window.zip(self.window.as_ref());
        for (at, store, is_read) in [(of.tokens, &self.tokens, false)]
            .into_iter()
            .chain(window.map(|(at, store)| (at, store, true)))
        {
            let Group { key, books, .. } = &groups[at];
            let of_books = books.usage(id)?;
            let bytes = store.slot_bytes() * key.kv_heads;
            usage.slots += of_books.slots * key.kv_heads;
            usage.bytes += of_books.bytes(bytes);
            let live = of_books.live_bytes(bytes);
            usage.live_bytes += live;
            if is_read {
                usage.read_bytes += live;
            }
            if self.own {
                usage.all_bytes += usage.tokens * bytes;
            }
        }
        Ok(())
    }
}
