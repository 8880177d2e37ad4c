//! Layers of MiniMax sparse attention: what an index branch chooses of a pool, and attention to it. Its keys lie in pages as an indexer's (`dsa`).

use burn::tensor::{Int, Tensor};
use burn_sparse_select::msa::MsaIndex;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::msa::MsaHeads;

use super::choice::of_rows;
use super::layer::Layer;
use super::shared::Shared;
use super::step::{PageLists, Road};
use super::store::{Store, lost};
use super::{KvPool, Step};

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
                let heads = [query, key, value];
                let (heads, choice) = msa.attend_parts(heads, index, self.attention_options())?;
                shared.give_prompt(choice);
                Ok(heads)
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
