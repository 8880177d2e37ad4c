//! Attention of new rows to what an indexer selects from a pool: keys of DeepSeek sparse attention, or blocks of MiniMax sparse attention. Both
//! indexers' keys are in pages (`dsa`).

use burn::tensor::Tensor;

use super::choice::{Shared, by_rows, of_rows};
use super::dsa::NO_VALUES;
use super::layer::Layer;
use super::step::{PageLists, Road};
use super::store::{Store, lost};
use super::{KvPool, LayerPages, Step};
use crate::PagedStore;
use crate::dsa::{DsaPages, choose_in_pages};
use burn_sparse_select::dsa::DsaIndex;
use burn_sparse_select::msa::MsaIndex;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::dsa::DsaHeads;
use burn_sparse_transformer::internal::Indexed as _;
use burn_sparse_transformer::msa::MsaHeads;

/// Heads with an indexer, and its outputs for a step's rows.
// Few values exist at a time, each made for a layer of a step; both variants are large.
#[allow(clippy::large_enum_variant)]
enum Indexed<'a> {
    Dsa(&'a DsaHeads, DsaIndex),
    Msa(&'a MsaHeads, MsaIndex),
}

impl Layer<'_> {
    /// Returns the outputs of DeepSeek or MiniMax sparse attention in a step of a pool, `[batch, heads, seq, d_v]`.
    pub(super) fn indexed_step(
        &self,
        x: Tensor<3>,
        pool: &mut KvPool,
        (step, shared): (&Step, &mut Shared),
        layer: usize,
    ) -> Result<Tensor<4>, TransformerError> {
        let (rows, positions) = (x.clone(), &step.positions);
        let indexed = match (self.choosing_dsa(), self.choosing_msa()) {
            (Some(dsa), _) => Indexed::Dsa(dsa, dsa.chosen_by(dsa.index(rows, positions)?)?),
            (None, Some(msa)) => Indexed::Msa(msa, msa.index(rows, positions)?),
            (None, None) => return Err(lost()),
        };
        let new = match &indexed {
            Indexed::Dsa(_, index) => index.k.clone(),
            Indexed::Msa(_, index) => index.k.clone(),
        };
        let [query, key, value] = self.project_heads(x, positions)?;
        let LayerPages {
            group,
            store,
            index,
            ..
        } = &mut pool.layers[layer];
        let (group, keys) = (&step.groups[*group], index.as_mut().ok_or_else(lost)?);
        group.write(store, [key.clone(), value.clone()])?;
        let [batch, _, seq, _] = new.dims();
        let none = Tensor::zeros([batch, 1, seq, NO_VALUES], &new.device());
        group.write_copied(keys, group.index_copies.as_ref(), [new, none])?;
        match &group.road {
            // Rows after a prompt's end are later than its queries, so none of these selects them.
            Road::Dense(_) => {
                let (heads, options) = ([query, key, value], self.attention_options());
                let seen = match indexed {
                    Indexed::Dsa(dsa, index) => dsa.attend(heads, index, options, false)?,
                    Indexed::Msa(msa, index) => msa.attend(heads, index, options, false)?,
                };
                shared.give_prompt(seen.aside.choice);
                Ok(seen.heads)
            }
            Road::Paged(page_lists) => {
                let told = (&**page_lists, shared);
                match indexed {
                    Indexed::Dsa(dsa, index) => {
                        self.attend_keys(query, (store, keys), told, dsa, index)
                    }
                    Indexed::Msa(msa, index) => {
                        self.attend_blocks(query, (store, keys), told, msa, &index)
                    }
                }
            }
            Road::Gathered(_) => Err(lost()),
        }
    }

    /// Computes attention to the keys that an indexer selects for each query; the indexer's keys are in the second store.
    fn attend_keys(
        &self,
        query: Tensor<4>,
        (store, keys): (&Store, &Store),
        told: (&PageLists, &mut Shared),
        dsa: &DsaHeads,
        index: DsaIndex,
    ) -> Result<Tensor<4>, TransformerError> {
        let PagedStore::Plain { keys, .. } = keys.pages()? else {
            return Err(lost());
        };
        let weights = index.weights.unsqueeze_dim::<4>(3);
        self.attend_chosen(query, store, told, |_, piece, lists| {
            let weights = by_rows(&weights, piece);
            let pages_of = DsaPages {
                q: by_rows(&index.q, piece),
                weights: weights.squeeze_dim(2),
                keys: keys.clone(),
                table: lists.table.clone(),
                spans: lists.spans.clone(),
            };
            Ok(choose_in_pages(dsa.op(), &pages_of, self.n_kv_heads())?)
        })
    }

    /// Like [`Self::attend_keys`], for blocks.
    fn attend_blocks(
        &self,
        query: Tensor<4>,
        (store, keys): (&Store, &Store),
        told: (&PageLists, &mut Shared),
        msa: &MsaHeads,
        index: &MsaIndex,
    ) -> Result<Tensor<4>, TransformerError> {
        let (page_lists, _) = &told;
        let (table, choice) = (page_lists.table.clone(), page_lists.choice);
        let choice = choice.ok_or_else(lost)?;
        let mut known = None;
        self.attend_chosen(query, store, told, |_, (first, count), lists| {
            let keys = match &known {
                Some(keys) => keys,
                None => {
                    let [batch, ..] = index.q.dims();
                    let [.., entries] = table.dims();
                    let table = of_rows(&table, batch, (0, 1)).reshape([batch, entries]);
                    let [keys, _] = keys.of_tables(table, index.k.dtype().into())?;
                    known.insert(keys)
                }
            };
            let q = index.q.clone().narrow(2, first, count);
            let index = MsaIndex::new(q, Tensor::clone(keys))?;
            Ok(msa.op().choose_pages(&index, &lists.spans, &choice)?)
        })
    }
}
