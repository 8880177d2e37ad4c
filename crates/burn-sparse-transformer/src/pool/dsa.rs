//! Layers of DeepSeek sparse attention: what a pool holds of their indexers, and attention of new rows to what they choose.
//!
//! An indexer's keys lie in pages of the same table as the keys and values, so what the books say holds for them, too: copies behind a fork, steps back, what is
//! known of a beginning. Behind a prompt all keys of a sequence are gathered, and those that are not chosen are hidden: a step reads what dense attention reads.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_blocksparse::DsaIndex;
use burn_blocksparse::pages::{Residency, SequenceId};

use super::step::{Gathered, HIDDEN, Road};
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
            Road::Gathered(gathered) => {
                let of_row = self.n_kv_heads / group.slots.dims()[1];
                let chosen = chosen(dsa, index, keys, gathered, [self.n_kv_heads, of_row])?;
                self.attend_gathered(query, store, &chosen)
            }
            Road::Paged(_) => Err(lost()),
        }
    }
}

/// Gathered keys, of which those that the indexer does not choose are hidden; `of_row` heads of keys share a page.
fn chosen(
    dsa: &DsaHeads,
    index: DsaIndex,
    keys: &Store,
    gathered: &Gathered,
    [kv_heads, of_row]: [usize; 2],
) -> Result<Gathered, TransformerError> {
    let [batch, _, seq, width] = index.q.dims();
    let count = gathered.count;
    // Slots of the first head of keys: of an indexer each page has one.
    let slots = gathered.ids.clone().reshape([batch, kv_heads, count]);
    let slots = slots.narrow(1, 0, 1).reshape([batch * count]);
    let page = keys.page_size()? as i32;
    let inside = slots.clone().remainder_scalar(page);
    let pages = (slots - inside.clone()).div_scalar(of_row as i32 * page);
    let [rows, _] = keys.gather(&(pages.mul_scalar(page) + inside), FloatDType::F32)?;
    let k = rows.reshape([batch, 1, count, width]).cast(index.q.dtype());
    let index = DsaIndex::new(index.q, k, index.weights)?;
    // Keys lie in the order of their positions, so those that a query sees are the first ones.
    let is_seen = gathered.bias.clone().greater_elem(HIDDEN / 2.0);
    let [_, heads, ..] = gathered.bias.dims();
    let seen: Tensor<2, Int> = is_seen
        .narrow(1, 0, 1)
        .int()
        .cast(DType::I32)
        .sum_dim(3)
        .reshape([batch, seq]);
    let left_out = dsa.op().left_out(&index, seen)?;
    let left_out = left_out.unsqueeze_dim::<4>(1);
    let left_out = left_out.expand([batch, heads, seq, count]);
    Ok(Gathered {
        count,
        ids: gathered.ids.clone(),
        bias: gathered.bias.clone().mask_fill(left_out, HIDDEN),
        distances: None,
    })
}
