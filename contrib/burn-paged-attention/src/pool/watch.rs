//! Scores of keys for eviction, from a layer's own queries and keys.

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::{AccumulatedAttentionOptions, accumulated_attention};
use burn_sparse_transformer::TransformerError;

use super::layer::Layer;
use super::step::PageLists;
use super::store::{Store, as_stored, ints};
use super::watched::{Evictor, Noted};
use super::{Group, KvStep};
use crate::PoolError;
use crate::paged::attention_sums;
use crate::pages::{EvictionScore, PagePool, SequenceId};

/// Added to the scores of masked pairs.
const HIDDEN: f64 = -1e30;

/// Places where the layers of a step record their rows for eviction.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    /// `[batch, 4]`: per sequence its seat, its rows, the number of earlier rows that can be rolled back, and the position of the first row.
    pub calls: Tensor<2, Int>,
    /// `[batch, 1, s]`: slots of queries; negative for those that later ones of the step would overwrite.
    pub slots: Tensor<3, Int>,
    /// Set if the step's rows are prompts, which see only each other.
    pub prompts: Option<Vec<Prompt>>,
}

/// A prompt of a step, whose keys are in the pages.
#[derive(Clone, Debug)]
pub(super) struct Prompt {
    tokens: usize,
    /// `[1, 1, rows]`: slots for the sums of the rows that can no longer be rolled back.
    slots: Tensor<3, Int>,
    /// [`Watch::calls`] of the rows that can be rolled back, which are the last.
    calls: Tensor<2, Int>,
    /// Page lists of each group of layers, if some rows can be rolled back.
    lists: Vec<PageLists>,
}

impl Evictor {
    /// Returns [`Watch::calls`] and [`Watch::slots`] of a batch whose sequences' rows begin at positions `starts`.
    pub(super) fn places(&self, steps: &[KvStep], starts: &[usize], seq: usize) -> [Vec<i32>; 2] {
        let (mut calls, mut slots) = (Vec::new(), Vec::new());
        let queries = self.queries().unwrap_or(0);
        for (step, &start) in steps.iter().zip(starts) {
            let [seat, loose] = self.seat(step.id);
            calls.extend([seat, step.tokens, loose, start].map(|x| x as i32));
            slots.extend((0..seq).map(|row| {
                let is_last = row < step.tokens && step.tokens - row <= queries;
                let slot = || seat * queries + (start + row) % queries;
                if is_last { slot() as i32 } else { -1 }
            }));
        }
        [calls, slots]
    }
}

impl Watch {
    /// For sequences whose new keys are in the block tables already.
    pub(super) fn new(
        evictor: &Evictor,
        groups: &[Group],
        steps: &[KvStep],
        starts: &[usize],
        (seq, is_dense): (usize, bool),
        device: &Device,
    ) -> Result<Self, PoolError> {
        let [calls, slots] = evictor.places(steps, starts, seq);
        let prompts = match is_dense && evictor.sums() {
            true => Some(
                steps
                    .iter()
                    .map(|step| Prompt::new(evictor, groups, step, device))
                    .collect::<Result<_, _>>()?,
            ),
            false => None,
        };
        Ok(Self {
            calls: ints(calls, [steps.len(), 4], device),
            slots: ints(slots, [steps.len(), 1, seq], device),
            prompts,
        })
    }
}

impl Prompt {
    fn new(
        evictor: &Evictor,
        groups: &[Group],
        step: &KvStep,
        device: &Device,
    ) -> Result<Self, PoolError> {
        let loose = step.tokens.min(evictor.rollback);
        let settled = step.tokens - loose;
        let lists = groups.iter().filter(|_| loose > 0);
        let lists = lists.map(|group| PageLists::of_all(&group.books, &[step.id], device));
        let calls = [evictor.seat(step.id)[0], loose, 0, settled].map(|x| x as i32);
        Ok(Self {
            tokens: step.tokens,
            slots: evictor.first_slots(step.id, settled, device),
            calls: ints(calls.to_vec(), [1, 4], device),
            lists: lists.collect::<Result<_, _>>()?,
        })
    }
}

/// Results of attention for a step's rows.
pub(super) struct Rows<'a> {
    /// `[batch, heads, s, d_k]`
    pub query: &'a Tensor<4>,
    /// `[batch, heads, s]`, if scores are sums.
    pub lse: Option<Tensor<3>>,
    /// `[batch, kv_heads, s, d_k]`, if the rows see only each other.
    pub key: Option<Tensor<4>>,
}

impl<'a> Rows<'a> {
    /// Queries alone, for scores without an lse.
    pub(super) fn of(query: &'a Tensor<4>) -> Self {
        Self {
            query,
            lse: None,
            key: None,
        }
    }
}

impl Layer<'_> {
    /// Records a step's rows for eviction. Their keys are in the pages of a group.
    pub(super) fn watch(
        &self,
        rows: Rows<'_>,
        store: &Store,
        (watch, lists): (&Watch, Option<&PageLists>),
        evictor: &mut Evictor,
        (layer, group): (usize, usize),
    ) -> Result<(), TransformerError> {
        let sums = evictor.sums();
        let rollback = evictor.rollback;
        let Some(noted) = evictor.noted(layer) else {
            return Ok(());
        };
        if !sums {
            return noted.write(rows.query.clone(), watch.slots.clone());
        }
        let Some(lse) = rows.lse else {
            return Ok(());
        };
        let (Some(prompts), Some(key)) = (&watch.prompts, &rows.key) else {
            let Some(lists) = lists else {
                return Ok(());
            };
            let rows = (rows.query.clone(), lse);
            return self.add_attention(rows, store, lists, watch.calls.clone(), noted);
        };
        for (at, prompt) in prompts.iter().enumerate() {
            let loose = prompt.tokens.min(rollback);
            let settled = prompt.tokens - loose;
            let part =
                |x: &Tensor<4>, first, rows| x.clone().narrow(0, at, 1).narrow(2, first, rows);
            let part_lse = |first, rows| lse.clone().narrow(0, at, 1).narrow(2, first, rows);
            if settled > 0 {
                // These queries see no later keys.
                let (q, k) = (part(rows.query, 0, settled), part(key, 0, settled));
                let layout = self.layout(settled, settled)?;
                let options = AccumulatedAttentionOptions::default()
                    .attention(self.attention_options().clone());
                let columns =
                    accumulated_attention(q, k, part_lse(0, settled), &layout, options)?.columns;
                let [_, heads, _] = columns.dims();
                let kv_heads = self.n_kv_heads();
                let columns = columns.reshape([kv_heads, heads / kv_heads, settled]);
                let columns = columns.sum_dim(1).reshape([1, kv_heads, settled, 1]);
                let ring = [1, kv_heads, settled, rollback];
                let none = (rollback > 0)
                    .then(|| Tensor::zeros(ring, (&columns.device(), columns.dtype())));
                let columns = std::iter::once(columns).chain(none).collect();
                noted.write(Tensor::cat(columns, 3), prompt.slots.clone())?;
            }
            if let Some(lists) = prompt.lists.get(group) {
                let calls = prompt.calls.clone();
                let rows = (part(rows.query, settled, loose), part_lse(settled, loose));
                self.add_attention(rows, store, lists, calls, noted)?;
            }
        }
        Ok(())
    }

    /// Adds the attention of some rows to the sums of the keys in their page lists.
    fn add_attention(
        &self,
        (query, lse): (Tensor<4>, Tensor<3>),
        store: &Store,
        lists: &PageLists,
        calls: Tensor<2, Int>,
        noted: &mut Noted,
    ) -> Result<(), TransformerError> {
        let store = store.pages()?;
        let query = as_stored(query, &store);
        let options = self.paged_options();
        let pages = lists.pages(store, self.n_kv_heads());
        noted.rows.with_keys(|sums| {
            let lse = lse.cast(FloatDType::from(sums.dtype()));
            attention_sums(sums, (query, lse), &pages, calls, &options)
        })
    }

    /// Returns the scores of the keys of sequences, `[sequences · kv_heads, slots]`, f32. `slots` is that of the longest; unused slots have
    /// arbitrary scores.
    pub(super) fn worth(
        &self,
        store: &Store,
        books: &PagePool,
        evictor: &Evictor,
        layer: usize,
        ids: &[SequenceId],
    ) -> Result<Option<Tensor<2>>, PoolError> {
        let kv_heads = self.n_kv_heads();
        let lengths = ids.iter().map(|&id| Ok((id, books.len(id)?)));
        let lengths = lengths.collect::<Result<Vec<_>, PoolError>>()?;
        let tables = books.tables(ids)?;
        let slots = tables.most_slots;
        let (rows, of_row) = (ids.len() * kv_heads, kv_heads / books.table_rows());
        let device = self.key.weight.device();
        let keys = || {
            let width = slots.div_ceil(books.config().page_size()).max(1);
            let pages = (0..rows).flat_map(|head| {
                let row = &tables.table[head / of_row * tables.max_pages..][..width];
                row.iter()
                    .map(move |&page| page.max(0) * of_row as i32 + (head % of_row) as i32)
            });
            let pages = ints(pages.collect(), [rows * width], &device);
            let keys = store.keys_of(&pages)?;
            let [_, page_size, channels] = keys.dims();
            let keys = keys.reshape([rows, width * page_size, channels]);
            let keys = keys.narrow(1, 0, slots);
            let dtype = accumulate_in(keys.dtype().into());
            Ok::<_, TransformerError>(keys.cast(dtype))
        };
        let scores = match evictor.config.score {
            EvictionScore::Custom => None,
            EvictionScore::Sum | EvictionScore::Mean => {
                evictor.total(layer, &lengths, slots, &device)?
            }
            EvictionScore::KeyNorm => {
                let keys = keys()?;
                let squares = keys.clone() * keys;
                Some(squares.sum_dim(2).sqrt().neg().reshape([rows, slots]))
            }
            EvictionScore::LastRow | EvictionScore::Votes { .. } => {
                let queries = evictor.last_queries(layer, &lengths, &device)?;
                let keys = keys()?;
                let stored = (0..rows).map(|head| tables.spans[head / of_row * 4] as usize);
                queries.map(|queries| self.votes(queries, keys, stored))
            }
        };
        Ok(scores.map(|scores| scores.cast(FloatDType::F32)))
    }

    pub(super) fn scale(&self, width: usize) -> f64 {
        (self.attention_options().scale).unwrap_or_else(|| 1.0 / (width as f64).sqrt())
    }

    /// Returns the mean attention of the newest queries `[sequences, heads, m, d_k]` to the first `stored` slots of each row of keys, averaged over
    /// the heads that share a KV head: `[sequences · kv_heads, slots]`.
    fn votes(
        &self,
        queries: Tensor<4>,
        keys: Tensor<3>,
        stored: impl Iterator<Item = usize>,
    ) -> Tensor<2> {
        let [_, heads, rows, width] = queries.dims();
        let [all, slots, _] = keys.dims();
        let kv_heads = self.n_kv_heads();
        let group = heads / kv_heads;
        let device = queries.device();
        let sums = FloatDType::from(keys.dtype());
        // The newest query sees all slots, each earlier one a slot less.
        let limits = stored.flat_map(|stored| {
            (0..rows).map(move |row| (stored + row + 1).saturating_sub(rows).max(1) as i32)
        });
        let limits = ints(limits.collect(), [all, 1, rows, 1], &device);
        let q = queries.cast(sums) * self.scale(width);
        let q = q.reshape([all, group * rows, width]);
        let scores = self.capped(q.matmul(keys.swap_dims(1, 2)));
        let scores = scores.reshape([all, group, rows, slots]);
        let places = Tensor::<1, Int>::arange(0..slots as i64, (&device, limits.dtype()));
        let is_hidden = places.reshape([1, 1, 1, slots]).greater_equal(limits);
        let is_hidden = is_hidden.expand([all, group, rows, slots]);
        let scores = scores.mask_fill(is_hidden, HIDDEN);
        let top = scores.clone().max_dim(3);
        let sinks = self.sink_logits();
        let (top, sink) = match sinks {
            None => (top, None),
            Some(sinks) => {
                let sinks = sinks.cast(sums).reshape([1, kv_heads, group, 1]);
                let sinks = sinks.expand([all / kv_heads, kv_heads, group, rows]);
                let sinks = sinks.reshape([all, group, rows, 1]);
                let top = top.max_pair(sinks.clone());
                (top.clone(), Some((sinks - top).exp()))
            }
        };
        let weights = (scores - top).exp();
        let total = weights.clone().sum_dim(3);
        let total = match sink {
            None => total,
            Some(sink) => total + sink,
        };
        let attention = (weights / total).reshape([all, group * rows, slots]);
        attention.mean_dim(1).reshape([all, slots])
    }

    pub(super) fn capped<const D: usize>(&self, scores: Tensor<D>) -> Tensor<D> {
        match self.attention_options().softcap {
            Some(softcap) => (scores / softcap).tanh() * softcap,
            None => scores,
        }
    }
}
