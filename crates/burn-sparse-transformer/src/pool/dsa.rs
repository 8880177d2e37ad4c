//! Layers of DeepSeek sparse attention: what a pool holds of their indexers, and attention of new rows to what they choose.
//!
//! An indexer's keys lie in pages of the same table as the keys and values, so what the books say holds for them, too: copies behind a fork, steps back, what is
//! known of a beginning. Behind a prompt a step reads all of an indexer's keys, and of the others those that are chosen.

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_blocksparse::pages::{Residency, SequenceId};
use burn_blocksparse::{DsaIndex, DsaPages, PagedKeysValues, PagedStore, paged_attention};

use super::attend::as_stored;
use super::choice::{SCORES, WALKS};
use super::step::{Road, Walk};
use super::store::{Store, Stored, lost};
use super::{Group, KvPool, KvPoolConfig, KvUsage, Step};
use crate::call::Call;
use crate::dsa::{DsaHeads, DsaParts};
use crate::error::{ensure, ensure_none};
use crate::{SparseMhaInput, SparseMultiHeadAttention, TransformerError};

/// That a pool of a configuration can keep a layer's keys.
pub(super) fn check(config: &KvPoolConfig) -> Result<(), TransformerError> {
    let expected = "none with dsa, whose tokens all choose their keys";
    ensure_none("choosing_prompts", config.prompts_choose, expected)?;
    let expected = "none with dsa, whose indexer chooses among all keys";
    ensure_none("eviction", config.eviction.is_some(), expected)?;
    let is_window = matches!(config.residency, Residency::Window { .. });
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
const NO_VALUES: usize = 4;

/// Adds what a sequence takes of an indexer's keys, and takes away what is not read of the others.
pub(super) fn add_usage(
    group: &Group,
    [keys, index]: [&Store; 2],
    id: SequenceId,
    usage: &mut KvUsage,
) -> Result<(), TransformerError> {
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

impl SparseMultiHeadAttention {
    /// What heads of DeepSeek sparse attention see in a step of a pool, `[batch, heads, seq, d_v]`.
    pub(super) fn dsa_pool_context(
        &self,
        input: SparseMhaInput,
        dsa: &DsaHeads,
        pool: &mut KvPool,
        step: &Step,
        layer: usize,
    ) -> Result<Tensor<4>, TransformerError> {
        let call = Call::at(&input, step.rows.positions.clone())?;
        let index = dsa.index(input.query.clone(), &call.key)?;
        let (query, key, value) = self.project(input, &call)?;
        let (at, store) = &mut pool.layers[layer];
        let group = &step.groups[*at];
        let keys = pool.indexes[layer].as_mut().ok_or_else(lost)?;
        if cfg!(debug_assertions) {
            store.poison(&group.freed, self.n_kv_heads / group.slots.dims()[1]);
            keys.poison(&group.freed, 1);
        }
        let pair = [key.clone(), value.clone()];
        store.write(group.copies.as_ref(), pair, group.slots.clone())?;
        let [batch, _, seq, _] = index.k.dims();
        let none = Tensor::zeros([batch, 1, seq, NO_VALUES], &index.k.device());
        let pair = [index.k.clone(), none];
        keys.write(group.index_copies.as_ref(), pair, group.slots.clone())?;
        match &group.road {
            // Rows behind a prompt are chosen by none.
            Road::Dense(_) => {
                let heads = [query, key, value];
                let parts = DsaParts { heads, index };
                Ok(dsa.attend(parts, &self.options, false)?.heads)
            }
            Road::Paged(walk) => self.attend_chosen_keys(query, [store, keys], (dsa, index), walk),
            Road::Gathered(_) => Err(lost()),
        }
    }

    /// Attention of queries `[batch, heads, s, d_k]` to the keys that an indexer chooses for each of them, where they lie.
    fn attend_chosen_keys(
        &self,
        query: Tensor<4>,
        [store, keys]: [&Store; 2],
        (dsa, index): (&DsaHeads, DsaIndex),
        walk: &Walk,
    ) -> Result<Tensor<4>, TransformerError> {
        let dtype = FloatDType::from(query.dtype());
        let (pages, options) = (store.pages()?, self.paged_options(&query));
        let PagedStore::Plain { keys, .. } = keys.pages()? else {
            return Err(lost());
        };
        let query = as_stored(query, &pages);
        let [batch, heads, seq, _] = query.dims();
        let walks = batch * seq;
        let [_, index_heads, ..] = index.q.dims();
        let (rows, queries) = (by_rows(query), by_rows(index.q));
        let weights = index.weights.swap_dims(1, 2);
        let weights = weights.reshape([walks, index_heads]);
        let listed = walk.table.dims()[2] * keys.dims()[1];
        let together = (SCORES / listed.max(1)).clamp(1, WALKS);
        let mut outs = Vec::with_capacity(walks.div_ceil(together));
        for first in (0..walks).step_by(together) {
            let count = together.min(walks - first);
            let spans = walk.spans.clone().narrow(0, first, count);
            let pages_of = DsaPages {
                q: queries.clone().narrow(0, first, count),
                weights: weights.clone().narrow(0, first, count),
                keys: keys.clone(),
                table: walk.table.clone().narrow(0, first, count),
                spans,
            };
            let rows = rows.clone().narrow(0, first, count).unsqueeze_dim(2);
            let mut chosen = if listed <= dsa.config().keep {
                // Where there is no more than what is chosen, there is no choice.
                let DsaPages { table, spans, .. } = pages_of;
                PagedKeysValues::of_store(pages.clone(), self.n_kv_heads, table, spans)
            } else {
                let slots = dsa.op().choose_in_pages(&pages_of, self.n_kv_heads)?;
                PagedKeysValues::of_slots(pages.clone(), slots, &pages_of.spans)
            };
            let counted = |counters: &&Tensor<1, Int>| counters.dims()[0] >= count * heads;
            chosen.counters = walk.counters.as_ref().filter(counted).cloned();
            outs.push(paged_attention(rows, &chosen, &options)?.out);
        }
        let out = match outs.len() {
            1 => outs.remove(0),
            _ => Tensor::cat(outs, 0),
        };
        let [.., width] = out.dims();
        let out = match seq {
            1 => out,
            _ => out.reshape([batch, seq, heads, width]).swap_dims(1, 2),
        };
        Ok(out.cast(dtype))
    }
}

/// Queries `[batch, heads, s, width]`, one for each row of a call: `[batch · s, heads, width]`.
fn by_rows(query: Tensor<4>) -> Tensor<3> {
    let [batch, heads, seq, width] = query.dims();
    // Of one row each the heads are in their places.
    match seq {
        1 => query.reshape([batch, heads, width]),
        _ => query.swap_dims(1, 2).reshape([batch * seq, heads, width]),
    }
}
