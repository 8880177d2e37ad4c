//! Layers of a pool whose queries choose pages by content.

use burn::tensor::{FloatDType, Int, Tensor};

use super::layer::Layer;
use super::step::PageLists;
use super::store::{Store, as_stored, ints, lost};
use super::{KvPoolConfig, dsa, nsa};
use crate::pages::{EvictionScore, Writes};
use crate::{PagedKeysValues, paged_attention};
use burn_sparse_select::PageSummary;
use burn_sparse_select::msa::Msa;
use burn_sparse_select::pages::PageChoice;
use burn_sparse_transformer::content::{
    ChoiceSharing, ContentAttention, ContentHeads, SharedChoice,
};
use burn_sparse_transformer::internal::ensure_none;
use burn_sparse_transformer::{SparseMultiHeadAttention, TransformerError};

/// Slots of a page, if neither the configuration nor a selection says.
const PAGE_SIZE: usize = 32;
/// Scores of pages that are in memory at a time.
const SCORES: usize = 1 << 24;
/// Queries of a call, at most: every part of a call looks at all of its page lists.
const PAGE_LISTS: usize = 512;

/// Slots of a page, if the configuration does not say: as many as the layers' selections have, where pages are all that they choose.
pub(super) fn page_size(layers: &[&SparseMultiHeadAttention], config: &KvPoolConfig) -> usize {
    let choosing = layers.iter().filter(|_| !config.prompts_choose);
    let sizes = choosing.filter_map(|mha| {
        if let Some(nsa) = mha.nsa() {
            return Some(nsa.config().pool_page_size().unwrap_or(16));
        }
        if let Some(msa) = mha.msa() {
            // A page is a block, if pages can be as wide.
            return Some(msa.config().block.clamp(16, 128));
        }
        let estimator = mha.selection()?.estimator();
        let block = estimator.grid().block;
        match estimator.page_summary()? {
            PageSummary::Bounds => Some(block),
            _ => Some(block.min(PAGE_SIZE)),
        }
    });
    sizes.min().unwrap_or(PAGE_SIZE)
}

/// How a layer chooses pages of a pool, if it does.
pub(super) fn of_layer(
    mha: &SparseMultiHeadAttention,
    config: &KvPoolConfig,
    page_size: usize,
) -> Result<Option<PageChoice>, TransformerError> {
    let shares = mha.choice_sharing().is_some();
    let expected = "none with layers that share a choice, and so the pages that they see";
    ensure_none("eviction", shares && config.eviction.is_some(), expected)?;
    if let Some(nsa) = mha.nsa() {
        return nsa::choice(nsa, config, page_size).map(Some);
    }
    match mha.content.as_ref().map(ContentHeads::config) {
        Some(ContentAttention::Msa(msa)) => {
            dsa::check("msa", config)?;
            return match mha.choosing_indexer() {
                Some(_) => Ok(Some(Msa::new(msa.block, msa.keep)?.on_pages(page_size)?)),
                None => Ok(None),
            };
        }
        Some(ContentAttention::Dsa(_)) => {
            dsa::check("dsa", config)?;
            return Ok(None);
        }
        _ => {}
    }
    if config.prompts_choose {
        check_prompts(mha, config)?;
        return Ok(None);
    }
    mha.ensure_decodable()?;
    let Some(selection) = mha.selection() else {
        return Ok(None);
    };
    let choice = selection.on_pages(page_size, mha.n_heads() / mha.n_kv_heads())?;
    config.ensure_no_window(format!(
        "All, Reachable or by eviction with the selection {selection}"
    ))?;
    check_eviction(config)?;
    for (argument, given) in [
        ("sinks", mha.sink_logits().is_some()),
        ("alibi", mha.attention_options().alibi.is_some()),
        ("relative_bias", mha.relative_bias.is_some()),
    ] {
        let expected = "none with a selection by which every query chooses for itself";
        ensure_none(argument, given, expected)?;
    }
    blocksparse::ensure! {
        TransformerError;
        mha.pattern().is_causal() => "pattern", format!("causal with the selection {selection}"), mha.pattern();
    }
    Ok(Some(choice))
}

/// That prompts of a layer can be read by its choice, if it has one.
fn check_prompts(
    mha: &SparseMultiHeadAttention,
    config: &KvPoolConfig,
) -> Result<(), TransformerError> {
    mha.ensure_no_content()?;
    if mha.selection().is_none() && mha.head_selections().is_none() {
        return Ok(());
    }
    config.ensure_no_window("All, Reachable or by eviction where prompts choose")?;
    check_eviction(config)
}

/// That keys are not evicted by attention that is not computed.
fn check_eviction(config: &KvPoolConfig) -> Result<(), TransformerError> {
    let by_attention = config.eviction.is_some_and(|eviction| {
        !matches!(
            eviction.score,
            EvictionScore::Custom | EvictionScore::KeyNorm
        )
    });
    let expected = "none that goes by attention to all keys, with a selection";
    ensure_none("eviction", by_attention, expected)
}

impl PageLists {
    /// Gives every row of a call a page list of its own, which ends at the row's own key.
    pub(super) fn by_row(
        &mut self,
        spans: &[i32],
        writes: &[Writes],
        table_rows: usize,
        seq: usize,
    ) {
        if seq == 1 {
            return;
        }
        let [batch, rows, entries] = self.table.dims();
        let table = self.table.clone().reshape([batch, 1, rows, entries]);
        let table = table.expand([batch, seq, rows, entries]);
        self.table = table.reshape([batch * seq, rows, entries]);
        let mut of_rows = Vec::with_capacity(seq * spans.len());
        for (writes, spans) in writes.iter().zip(spans.chunks(4 * table_rows)) {
            for row in 0..seq {
                // Rows after a sequence's own are none, and see what its last one does.
                let behind = writes.tokens.saturating_sub(row + 1) as i32;
                for span in spans.chunks(4) {
                    of_rows.extend([span[0] - behind, span[1], span[2], span[3]]);
                }
            }
        }
        self.spans = ints(of_rows, [batch * seq, rows, 4], &self.table.device());
    }
}

impl Layer<'_> {
    /// Attention of queries `[batch, heads, s, d_k]`, each of which has a page list of its own, to what `choose` finds of the lists of a piece's rows
    /// `[rows, heads, d_k]`: pages where queries choose pages, and else slots of keys. Where there is no more than what is chosen, there is no choice.
    pub(super) fn attend_chosen(
        &self,
        query: Tensor<4>,
        store: &Store,
        (page_lists, shared): (&PageLists, &mut Shared),
        mut choose: impl FnMut(
            &Tensor<3>,
            Piece,
            &PagedKeysValues,
        ) -> Result<Tensor<3, Int>, TransformerError>,
    ) -> Result<Tensor<4>, TransformerError> {
        let ([batch, ..], [.., entries]) = (query.dims(), page_lists.table.dims());
        let keys = entries * store.page_size();
        let indexer = self.choosing_indexer();
        let has_choice = match (&page_lists.choice, indexer) {
            (Some(choice), _) => entries > choice.selected_pages(),
            (None, Some(ContentAttention::Dsa(dsa))) => keys > dsa.keep,
            (None, _) => return Err(lost()),
        };
        let scores = match (&page_lists.choice, indexer) {
            (Some(_), None) => self.n_kv_heads() * entries,
            (Some(_), Some(_)) => self.n_kv_heads() * keys,
            (None, _) => keys,
        };
        self.attend_in_pieces(
            query,
            store,
            page_lists,
            batch * scores,
            |rows, piece, lists| {
                let chosen = shared.piece(|| match has_choice {
                    true => choose(rows, piece, &lists).map(Some),
                    false => Ok(None),
                })?;
                Ok(match (chosen, &page_lists.choice) {
                    (Some(slots), None) => {
                        PagedKeysValues::of_slots(lists.store, slots, &lists.spans)
                    }
                    (selected, _) => PagedKeysValues { selected, ..lists },
                })
            },
        )
    }

    /// Attention of queries `[batch, heads, s, d_k]`, each of which has a page list of its own: to what `choose` makes of the lists of some rows of each
    /// sequence at a time, which looks at so many numbers for a row of each.
    pub(super) fn attend_in_pieces(
        &self,
        query: Tensor<4>,
        store: &Store,
        page_lists: &PageLists,
        numbers: usize,
        mut choose: impl FnMut(
            &Tensor<3>,
            Piece,
            PagedKeysValues,
        ) -> Result<PagedKeysValues, TransformerError>,
    ) -> Result<Tensor<4>, TransformerError> {
        let dtype = FloatDType::from(query.dtype());
        let (pages, options) = (store.pages()?, self.paged_options());
        let query = as_stored(query, &pages);
        let [batch, heads, seq, _] = query.dims();
        // More than one row at a time, whatever a context is.
        let together = (SCORES / numbers.max(1)).min(PAGE_LISTS / batch);
        let together = together.clamp(1, seq);
        let mut outs = Vec::with_capacity(seq.div_ceil(together));
        for first in (0..seq).step_by(together) {
            let piece = (first, together.min(seq - first));
            let lists = [&page_lists.table, &page_lists.spans];
            let [table, spans] = lists.map(|lists| of_rows(lists, batch, piece));
            let all = PagedKeysValues::of_store(pages.clone(), self.n_kv_heads(), table, spans);
            let rows = by_rows(&query, piece);
            let mut chosen = choose(&rows, piece, all)?;
            chosen.counters = page_lists.counters_of(batch * piece.1 * heads);
            let out = paged_attention(rows.unsqueeze_dim(2), &chosen, &options)?.out;
            let [.., width] = out.dims();
            // Of one row each the heads are in their places.
            outs.push(match piece.1 {
                1 => out,
                count => out.reshape([batch, count, heads, width]).swap_dims(1, 2),
            });
        }
        Ok(joined(outs, 2).cast(dtype))
    }
}

/// The first of some rows of each sequence, and how many there are.
pub(super) type Piece = (usize, usize);

/// Of page lists `[batch · s, T, numbers]`, one for each row, those of a piece.
pub(super) fn of_rows(x: &Tensor<3, Int>, batch: usize, (first, count): Piece) -> Tensor<3, Int> {
    let [queries, rows, numbers] = x.dims();
    if count * batch == queries {
        return x.clone();
    }
    let x = (x.clone()).reshape([batch, queries / batch, rows * numbers]);
    x.narrow(1, first, count)
        .reshape([batch * count, rows, numbers])
}

/// Queries `[batch, heads, s, width]` of a piece, one for each row: `[rows, heads, width]`, as the page lists follow each other.
pub(super) fn by_rows(query: &Tensor<4>, (first, count): Piece) -> Tensor<3> {
    let [batch, heads, seq, width] = query.dims();
    let query = match count == seq {
        true => query.clone(),
        false => query.clone().narrow(2, first, count),
    };
    // Of one row each the heads are in their places.
    match count {
        1 => query.reshape([batch, heads, width]),
        _ => (query.swap_dims(1, 2)).reshape([batch * count, heads, width]),
    }
}

/// Parts one after the other.
pub(super) fn joined(mut parts: Vec<Tensor<4>>, dim: usize) -> Tensor<4> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, dim),
    }
}

/// Choice of the latest layer of a step that gives one, for the layers that take it.
#[derive(Default)]
pub(super) struct Shared {
    /// Of whole prompts.
    pub prompt: Option<SharedChoice>,
    /// Pages or slots of each piece of the rows, as attention runs over them; none where there is nothing to choose.
    pieces: Vec<Option<Tensor<3, Int>>>,
    /// Pieces that the present layer has taken.
    taken: usize,
    sharing: Option<ChoiceSharing>,
}

impl Shared {
    /// Begins a layer.
    pub(super) fn begin(&mut self, sharing: Option<ChoiceSharing>) {
        let before = match sharing {
            Some(ChoiceSharing::Takes) => std::mem::take(self),
            None | Some(ChoiceSharing::Gives) => Self::default(),
        };
        *self = Self {
            taken: 0,
            sharing,
            ..before
        };
    }

    /// Keeps the choice of a prompt, if the layer gives it.
    pub(super) fn give_prompt(&mut self, choice: Option<SharedChoice>) {
        self.prompt = choice.filter(|_| self.sharing == Some(ChoiceSharing::Gives));
    }

    /// The choice of the next piece: what `choose` finds, or what the layer takes.
    pub(super) fn piece(
        &mut self,
        choose: impl FnOnce() -> Result<Option<Tensor<3, Int>>, TransformerError>,
    ) -> Result<Option<Tensor<3, Int>>, TransformerError> {
        match self.sharing {
            None => choose(),
            Some(ChoiceSharing::Gives) => {
                let chosen = choose()?;
                self.pieces.push(chosen.clone());
                Ok(chosen)
            }
            Some(ChoiceSharing::Takes) => {
                let piece = self.pieces.get(self.taken).cloned();
                self.taken += 1;
                let expected = "that of an earlier layer, for one that takes it";
                piece.ok_or_else(|| TransformerError::argument("choice", expected, "none"))
            }
        }
    }
}
