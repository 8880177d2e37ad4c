//! Selection of pages by content in the layers of a pool.

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

/// Page size if neither the configuration nor a selection sets it.
const PAGE_SIZE: usize = 32;
/// Number of page scores that are in memory at a time.
const SCORES: usize = 1 << 24;
/// Largest number of queries in a call: every cube of a call visits all of its page lists.
const PAGE_LISTS: usize = 512;

/// Returns the page size if the configuration does not set it: the block size of the layers' selections, if they select pages.
pub(super) fn page_size(layers: &[&SparseMultiHeadAttention], config: &KvPoolConfig) -> usize {
    let choosing = layers.iter().filter(|_| !config.prompts_choose);
    let sizes = choosing.filter_map(|mha| {
        if let Some(nsa) = mha.nsa() {
            return Some(nsa.config().pool_page_size().unwrap_or(16));
        }
        if let Some(msa) = mha.msa() {
            // A page is a block, if pages can be that large.
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

/// Returns a layer's page selection, if any.
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

/// Checks that a layer can apply its selection, if any, to prompts.
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

/// Checks that eviction needs no attention that is not computed.
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
    /// Gives every row of a call its own page list, which ends at the row's own key.
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
                // Rows after a sequence's own are unused; they get the list of its last row.
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
    /// Computes attention of queries `[batch, heads, s, d_k]`, each with its own page list, to what `choose` selects for a piece's rows
    /// `[rows, heads, d_k]`: pages if the layer selects pages, otherwise slots of keys. If the lists are no longer than the selection, nothing is
    /// selected.
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

    /// Computes attention of queries `[batch, heads, s, d_k]`, each with its own page list, in pieces of some rows of each sequence. `choose`
    /// selects among the lists of a piece; it holds `numbers` elements in memory per row of all sequences.
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
        // At least one row at a time, however long the context is.
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
            // With one row the order of heads is right already.
            outs.push(match piece.1 {
                1 => out,
                count => out.reshape([batch, count, heads, width]).swap_dims(1, 2),
            });
        }
        Ok(joined(outs, 2).cast(dtype))
    }
}

/// First row and number of rows of a piece, in each sequence.
pub(super) type Piece = (usize, usize);

/// Takes a piece's rows of page lists `[batch · s, T, numbers]`, one list per row.
pub(super) fn of_rows(x: &Tensor<3, Int>, batch: usize, (first, count): Piece) -> Tensor<3, Int> {
    let [queries, rows, numbers] = x.dims();
    if count * batch == queries {
        return x.clone();
    }
    let x = (x.clone()).reshape([batch, queries / batch, rows * numbers]);
    x.narrow(1, first, count)
        .reshape([batch * count, rows, numbers])
}

/// Takes a piece's queries from `[batch, heads, s, width]` as `[rows, heads, width]`, in the order of the page lists.
pub(super) fn by_rows(query: &Tensor<4>, (first, count): Piece) -> Tensor<3> {
    let [batch, heads, seq, width] = query.dims();
    let query = match count == seq {
        true => query.clone(),
        false => query.clone().narrow(2, first, count),
    };
    // With one row the order of heads is right already.
    match count {
        1 => query.reshape([batch, heads, width]),
        _ => (query.swap_dims(1, 2)).reshape([batch * count, heads, width]),
    }
}

pub(super) fn joined(mut parts: Vec<Tensor<4>>, dim: usize) -> Tensor<4> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, dim),
    }
}

/// Selection of the latest layer of a step that shares one, for the layers that reuse it.
#[derive(Default)]
pub(super) struct Shared {
    /// Selection of whole prompts.
    pub prompt: Option<SharedChoice>,
    /// Pages or slots of each piece of rows, in the order of attention; None if there was nothing to select.
    pieces: Vec<Option<Tensor<3, Int>>>,
    /// Number of pieces that the present layer has reused.
    taken: usize,
    sharing: Option<ChoiceSharing>,
}

impl Shared {
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

    /// Stores the selection of a prompt, if the layer shares it.
    pub(super) fn give_prompt(&mut self, choice: Option<SharedChoice>) {
        self.prompt = choice.filter(|_| self.sharing == Some(ChoiceSharing::Gives));
    }

    /// Returns the selection of the next piece: from `choose`, or the one that the layer reuses.
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
