//! Layers of MiniMax sparse attention: what an index branch chooses of a pool, and attention to it. Its keys lie in pages as an indexer's (`dsa`).

use burn::tensor::{FloatDType, Int, Tensor};
use burn_sparse_select::msa::MsaIndex;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::msa::MsaHeads;

use super::attend::as_stored;
use super::choice::{SCORES, WALKS};
use super::layer::Layer;
use super::step::{Road, Walk};
use super::store::{Store, lost};
use super::{KvPool, Step};

impl Layer<'_> {
    /// What heads of MiniMax sparse attention see in a step of a pool, `[batch, heads, seq, d_v]`.
    pub(super) fn msa_step(
        &self,
        x: Tensor<3>,
        msa: &MsaHeads,
        pool: &mut KvPool,
        step: &Step,
        layer: usize,
    ) -> Result<Tensor<4>, TransformerError> {
        let index = msa.index(x.clone(), &step.positions)?;
        let [query, key, value] = self.project_heads(x, &step.positions)?;
        let pair = [key.clone(), value.clone()];
        let (road, stores) = self.write_indexed(pool, step, layer, (pair, index.k.clone()))?;
        match road {
            // Rows behind a prompt are chosen by none.
            Road::Dense(_) => {
                msa.attend_parts([query, key, value], index, self.attention_options())
            }
            Road::Paged(walk) => self.attend_chosen_blocks(query, stores, (msa, index), walk),
            Road::Gathered(_) => Err(lost()),
        }
    }

    /// Attention of queries `[batch, heads, s, d_k]`, each of which is a walk of its own, to the pages of the blocks that they choose.
    fn attend_chosen_blocks(
        &self,
        query: Tensor<4>,
        [store, keys]: [&Store; 2],
        (msa, index): (&MsaHeads, MsaIndex),
        walk: &Walk,
    ) -> Result<Tensor<4>, TransformerError> {
        let dtype = FloatDType::from(query.dtype());
        let (pages, options) = (store.pages()?, self.paged_options());
        let choice = walk.choice.as_ref().ok_or_else(lost)?;
        let query = as_stored(query, &pages);
        let [batch, heads, seq, width] = query.dims();
        let [_, _, entries] = walk.table.dims();
        let of_rows = |x: &Tensor<3, Int>, first: usize, count: usize| {
            let [_, _, numbers] = x.dims();
            let x = x.clone().reshape([batch, seq, numbers]);
            x.narrow(1, first, count)
                .reshape([batch * count, 1, numbers])
        };
        // Where there is no more than what is chosen, there is no choice.
        let keys = match entries > choice.selected_pages() {
            true => {
                let table = of_rows(&walk.table, 0, 1).reshape([batch, entries]);
                let [keys, _] = keys.of_tables(table, index.k.dtype().into())?;
                Some(keys)
            }
            false => None,
        };
        let numbers = batch * self.n_kv_heads() * entries * choice.page;
        // More than one row at a time, whatever a context is.
        let together = (SCORES / numbers.max(1)).min(WALKS / batch).clamp(1, seq);
        let mut outs = Vec::with_capacity(seq.div_ceil(together));
        for first in (0..seq).step_by(together) {
            let count = together.min(seq - first);
            let table = of_rows(&walk.table, first, count);
            let spans = of_rows(&walk.spans, first, count);
            let selected = match &keys {
                Some(keys) => {
                    let q = index.q.clone().narrow(2, first, count);
                    let index = MsaIndex::new(q, keys.clone())?;
                    Some(msa.op().choose_pages(&index, &spans, choice)?)
                }
                None => None,
            };
            let rows = query.clone().narrow(2, first, count).swap_dims(1, 2);
            let rows = rows.reshape([batch * count, heads, width]);
            let part = (rows, table, spans);
            let out = self.attend_walks(part, selected, &pages, walk, &options)?;
            let [.., width] = out.dims();
            let out = out.reshape([batch, count, heads, width]);
            outs.push(out.swap_dims(1, 2));
        }
        let out = match outs.len() {
            1 => outs.remove(0),
            _ => Tensor::cat(outs, 2),
        };
        Ok(out.cast(dtype))
    }
}
