//! Native sparse attention of new rows to its branches in a pool.

use burn::tensor::{FloatDType, Tensor};
use burn_sparse_select::nsa::NsaBranches;
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::nsa::NsaHeads;

use super::choice::{Piece, joined, of_rows};
use super::layer::Layer;
use super::nsa_step::Ended;
use super::step::{PageLists, Road};
use super::store::{Store, lost};
use super::{KvPool, LayerPages, Step};
use crate::PagedKeysValues;

impl Layer<'_> {
    /// Returns the outputs of native sparse attention in a step of a pool, `[batch, heads, seq, d_v]`.
    pub(super) fn nsa_step(
        &self,
        x: Tensor<3>,
        nsa: &NsaHeads,
        pool: &mut KvPool,
        step: &Step,
        layer: usize,
    ) -> Result<Tensor<4>, TransformerError> {
        let (heads, placing) = self.nsa_projections(x.clone(), &step.positions)?;
        let query = heads.query.clone();
        let gates = nsa.gates(x.clone(), &query)?;
        let new = nsa.branches(x, heads, &step.positions, &placing)?;

        let LayerPages {
            group,
            store,
            branches,
            ..
        } = &mut pool.layers[layer];
        let group = &step.groups[*group];
        let branches = branches.as_mut().ok_or_else(lost)?;
        let of_step = group.nsa.as_ref().ok_or_else(lost)?;
        let of_group = |at: usize| &step.groups[at];
        group.write(store, new.selected.clone())?;
        let tokens = of_group(of_step.groups.tokens);
        tokens.write(&mut branches.tokens, new.tokens.clone())?;
        let window = of_step.groups.window.map(of_group);
        if let (Some(store), Some(group)) = (&mut branches.window, window) {
            group.write(store, new.window.clone())?;
        }
        branches.entries.copy(of_step.copies.as_ref())?;

        if let Road::Dense(_) = group.road {
            let compressed = nsa.compressed(new.tokens.clone(), 0, &placing)?;
            if let (Some(pair), Some(ended)) = (compressed.clone(), &of_step.ended) {
                branches.entries.write(None, pair, ended.slots.clone())?;
            }
            return nsa.attend(query, new, compressed, gates);
        }
        if let Some(Ended {
            of_pages: Some([ids, last]),
            slots,
        }) = &of_step.ended
        {
            let rows = branches.tokens.gather(ids, query.dtype().into())?;
            let [count] = last.dims();
            let blocks = rows.map(|rows| {
                let [_, width] = rows.dims();
                rows.reshape([count, self.n_kv_heads(), nsa.config().block, width])
            });
            let last_of = |_: [usize; 2]| last.clone();
            let pair = nsa.compressed_at(blocks, last_of, &placing)?;
            let pair = pair.ok_or_else(lost)?;
            branches.entries.write(None, pair, slots.clone())?;
        }
        let Road::Paged(page_lists) = &group.road else {
            return Err(lost());
        };
        let [compressed, selected] = self.attend_compressed_and_chosen(
            nsa,
            &query,
            [&*store, &branches.entries],
            page_lists,
        )?;
        let dtype = FloatDType::from(query.dtype());
        let window = match (&branches.window, window.map(|group| &group.road)) {
            (Some(store), Some(Road::Paged(page_lists))) => {
                let seen = self.attend_pages(query, store.pages()?, page_lists)?;
                Some(seen.out.cast(dtype))
            }
            (None, None) => None,
            _ => return Err(lost()),
        };
        let seen = NsaBranches::new(Some(compressed), selected, window);
        Ok(seen.gated(gates)?)
    }

    /// Computes the compressed and the selected branch of queries `[batch, heads, s, d_k]`, each with its own page list.
    fn attend_compressed_and_chosen(
        &self,
        nsa: &NsaHeads,
        query: &Tensor<4>,
        [store, entries]: [&Store; 2],
        page_lists: &PageLists,
    ) -> Result<[Tensor<4>; 2], TransformerError> {
        let choice = page_lists.choice.as_ref().ok_or_else(lost)?;
        let [batch, heads, ..] = query.dims();
        let [_, _, places] = page_lists.table.dims();
        let table = of_rows(&page_lists.table, batch, (0, 1)).reshape([batch, places]);
        let compressed = entries.of_tables(table, query.dtype().into())?;
        let [_, _, strides, _] = compressed[0].dims();
        let numbers = batch * heads * strides;
        let mut by_pairs = Vec::new();
        let choose = |_: &Tensor<3>, (first, count): Piece, lists: PagedKeysValues| {
            let rows = query.clone().narrow(2, first, count);
            // A row's page list ends with its own key.
            let positions = lists.spans.clone().narrow(2, 0, 1).sub_scalar(1);
            let positions = positions.reshape([batch, count]);
            let seen = (nsa.op()).of_strides(rows, compressed.clone(), &positions)?;
            by_pairs.push(seen.out);
            // If the list is no longer than the selection, nothing is selected.
            let selected = match places > choice.selected_pages() {
                true => Some(nsa.op().choose_pages(seen.importance, &positions, choice)?),
                false => None,
            };
            Ok(PagedKeysValues { selected, ..lists })
        };
        let by_pages = self.attend_in_pieces(query.clone(), store, page_lists, numbers, choose)?;
        Ok([joined(by_pairs, 2), by_pages])
    }
}
