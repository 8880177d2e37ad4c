//! Attention of new rows to what an indexer chooses of a pool: keys of DeepSeek sparse attention, or blocks of MiniMax sparse attention. Both indexers' keys lie in
//! pages (`dsa`).

use burn::tensor::{Int, Tensor};

use super::choice::{Shared, by_rows, of_rows};
use super::dsa::NO_VALUES;
use super::layer::Layer;
use super::step::{PageLists, Road};
use super::store::{Store, lost};
use super::{KvPool, Step};
use crate::dsa::{DsaPages, choose_in_pages};
use crate::{PagedKeysValues, PagedStore};
use burn_sparse_select::msa::MsaIndex;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::dsa::DsaHeads;
use burn_sparse_transformer::internal::Indexed;
use burn_sparse_transformer::msa::MsaHeads;

impl Layer<'_> {
    /// What heads of DeepSeek sparse attention see in a step of a pool, `[batch, heads, seq, d_v]`.
    pub(super) fn dsa_step(
        &self,
        x: Tensor<3>,
        dsa: &DsaHeads,
        pool: &mut KvPool,
        (step, shared): (&Step, &mut Shared),
        layer: usize,
    ) -> Result<Tensor<4>, TransformerError> {
        let index = dsa.chosen_by(dsa.index(x.clone(), &step.positions)?)?;
        let [query, key, value] = self.project_heads(x, &step.positions)?;
        let pair = [key.clone(), value.clone()];
        let (road, [store, keys]) =
            self.write_indexed(pool, step, layer, (pair, index.k.clone()))?;
        match road {
            // Rows after a prompt are chosen by none.
            Road::Dense(_) => {
                let (heads, options) = ([query, key, value], self.attention_options());
                let seen = dsa.attend(heads, index, options, false)?;
                shared.give_prompt(seen.aside.choice);
                Ok(seen.heads)
            }
            Road::Paged(page_lists) => {
                let PagedStore::Plain { keys, .. } = keys.pages()? else {
                    return Err(lost());
                };
                let [batch, index_heads, seq, _] = index.q.dims();
                let weights = index.weights.swap_dims(1, 2);
                let weights = weights.reshape([batch * seq, index_heads]);
                let queries = by_rows(index.q);
                let choose = |(first, count), lists: &PagedKeysValues| {
                    let pages_of = DsaPages {
                        q: queries.clone().narrow(0, first, count),
                        weights: weights.clone().narrow(0, first, count),
                        keys: keys.clone(),
                        table: lists.table.clone(),
                        spans: lists.spans.clone(),
                    };
                    Ok(choose_in_pages(dsa.op(), &pages_of, self.n_kv_heads())?)
                };
                let chosen = (&**page_lists, dsa.config().keep);
                self.attend_chosen_keys(query, store, chosen, shared, choose)
            }
            Road::Gathered(_) => Err(lost()),
        }
    }

    /// Writes a step's keys and values, and an indexer's keys: how queries see them, and where they are.
    pub(super) fn write_indexed<'a>(
        &self,
        pool: &'a mut KvPool,
        step: &'a Step,
        layer: usize,
        (pair, index): ([Tensor<4>; 2], Tensor<4>),
    ) -> Result<(&'a Road, [&'a Store; 2]), TransformerError> {
        let (at, store) = &mut pool.layers[layer];
        let group = &step.groups[*at];
        let keys = pool.indexes[layer].as_mut().ok_or_else(lost)?;
        group.write(store, pair)?;
        let [batch, _, seq, _] = index.dims();
        let none = Tensor::zeros([batch, 1, seq, NO_VALUES], &index.device());
        group.write_copied(keys, group.index_copies.as_ref(), [index, none])?;
        Ok((&group.road, [store, keys]))
    }

    /// Attention of queries `[batch, heads, s, d_k]` to up to `keep` keys that an indexer chooses for each of them, where they lie: `choose` finds the slots of a
    /// piece of the rows with its page lists.
    pub(super) fn attend_chosen_keys(
        &self,
        query: Tensor<4>,
        store: &Store,
        (page_lists, keep): (&PageLists, usize),
        shared: &mut Shared,
        choose: impl Fn((usize, usize), &PagedKeysValues) -> Result<Tensor<3, Int>, TransformerError>,
    ) -> Result<Tensor<4>, TransformerError> {
        let listed = page_lists.table.dims()[2] * store.page_size();
        self.attend_by_row(query, store, page_lists, listed, |_, piece, lists| {
            // Where there is no more than what is chosen, there is no choice.
            let slots = shared.piece(|| match listed > keep {
                true => choose(piece, &lists).map(Some),
                false => Ok(None),
            })?;
            Ok(match slots {
                Some(slots) => PagedKeysValues::of_slots(lists.store, slots, &lists.spans),
                None => lists,
            })
        })
    }
}

impl Layer<'_> {
    /// What heads of MiniMax sparse attention see in a step of a pool, `[batch, heads, seq, d_v]`.
    pub(super) fn msa_step(
        &self,
        x: Tensor<3>,
        msa: &MsaHeads,
        pool: &mut KvPool,
        (step, shared): (&Step, &mut Shared),
        layer: usize,
    ) -> Result<Tensor<4>, TransformerError> {
        let index = msa.index(x.clone(), &step.positions)?;
        let [query, key, value] = self.project_heads(x, &step.positions)?;
        let pair = [key.clone(), value.clone()];
        let (road, [store, keys]) =
            self.write_indexed(pool, step, layer, (pair, index.k.clone()))?;
        match road {
            // Rows after a prompt are chosen by none.
            Road::Dense(_) => {
                let (heads, options) = ([query, key, value], self.attention_options());
                let seen = msa.attend(heads, index, options, false)?;
                shared.give_prompt(seen.aside.choice);
                Ok(seen.heads)
            }
            Road::Paged(page_lists) => {
                let mut known = None;
                let choose = |(first, count),
                              spans: &Tensor<3, Int>|
                 -> Result<Tensor<3, Int>, TransformerError> {
                    let choice = page_lists.choice.as_ref().ok_or_else(lost)?;
                    let keys = match &known {
                        Some(keys) => keys,
                        None => {
                            let [batch, ..] = index.q.dims();
                            let [.., entries] = page_lists.table.dims();
                            let table = of_rows(&page_lists.table, batch, (0, 1));
                            let table = table.reshape([batch, entries]);
                            let [keys, _] = keys.of_tables(table, index.k.dtype().into())?;
                            known.insert(keys)
                        }
                    };
                    let q = index.q.clone().narrow(2, first, count);
                    let index = MsaIndex::new(q, Tensor::clone(keys))?;
                    Ok(msa.op().choose_pages(&index, spans, choice)?)
                };
                self.attend_chosen_blocks(query, store, (page_lists, shared), choose)
            }
            Road::Gathered(_) => Err(lost()),
        }
    }

    /// Attention of queries `[batch, heads, s, d_k]`, each of which has a page list of its own, to the pages of the blocks that they choose: `choose` finds those
    /// of a piece of each sequence's rows, with these spans.
    pub(super) fn attend_chosen_blocks(
        &self,
        query: Tensor<4>,
        store: &Store,
        (page_lists, shared): (&PageLists, &mut Shared),
        mut choose: impl FnMut(
            (usize, usize),
            &Tensor<3, Int>,
        ) -> Result<Tensor<3, Int>, TransformerError>,
    ) -> Result<Tensor<4>, TransformerError> {
        let choice = page_lists.choice.as_ref().ok_or_else(lost)?;
        let ([batch, ..], [.., entries]) = (query.dims(), page_lists.table.dims());
        let numbers = batch * self.n_kv_heads() * entries * choice.page;
        self.attend_by_sequence(query, store, page_lists, numbers, |piece, spans| {
            shared.piece(|| match entries > choice.selected_pages() {
                true => choose(piece, spans).map(Some),
                // Where there is no more than what is chosen, there is no choice.
                false => Ok(None),
            })
        })
    }
}
