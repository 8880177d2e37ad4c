//! What eviction has to know of attention: scores of keys, from a layer's own queries and keys.

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::{AccumulatedAttentionOptions, accumulated_attention};
use burn_sparse_transformer::TransformerError;

use super::KvStep;
use super::layer::Layer;
use super::store::{Store, ints};
use super::watched::{Evictor, Watched, fit};
use crate::PoolError;
use crate::pages::{EvictionScore, PagePool, SequenceId};

/// Added to the scores of pairs that do not count.
const HIDDEN: f64 = -1e30;

/// What the layers of a step look at.
#[derive(Debug)]
pub(super) struct Watch {
    pub entries: Vec<WatchEntry>,
    /// `[batch · kv_heads · pages of a row]`, of all pages.
    pages: Tensor<1, Int>,
    /// `[batch, T, s]`: the slots of its row that each query sees, 0 for rows that are none.
    limits: Tensor<3, Int>,
    /// Slots of the pages of a row.
    width: usize,
}

/// A sequence of a step.
#[derive(Clone, Debug)]
pub(super) struct WatchEntry {
    pub id: SequenceId,
    tokens: usize,
    /// Keys of each table row, the new ones included.
    stored: Vec<usize>,
    /// Slots of the sequence's own pages, however long others of the batch are.
    width: usize,
    /// Whether keys are evicted after the step.
    pub is_due: bool,
}

impl Watch {
    /// Of sequences whose new keys have their places in the books already.
    pub(super) fn new(
        books: &PagePool,
        steps: &[KvStep],
        due: &[bool],
        kv_heads: usize,
        seq: usize,
        device: &Device,
    ) -> Result<Self, PoolError> {
        let rows = books.table_rows();
        let heads_of_row = kv_heads / rows;
        let page_size = books.config().page_size();
        let batch: Vec<SequenceId> = steps.iter().map(|step| step.id).collect();
        let tables = books.tables(&batch)?;
        // Nothing dies of age: the first span is all there is.
        let stored = |at: usize| tables.spans[at * 4] as usize;
        let of_row = tables.most_slots.div_ceil(page_size).max(1);
        let mut pages = Vec::with_capacity(batch.len() * kv_heads * of_row);
        let mut limits = vec![0; batch.len() * rows * seq];
        let mut entries = Vec::with_capacity(batch.len());
        for (at, (step, &is_due)) in steps.iter().zip(due).enumerate() {
            for head in 0..kv_heads {
                let row = at * rows + head / heads_of_row;
                for entry in 0..of_row {
                    let page = (tables.table[row * tables.max_pages..][..tables.max_pages])
                        .get(entry)
                        .map_or(0, |&page| page.max(0));
                    pages.push(page * heads_of_row as i32 + (head % heads_of_row) as i32);
                }
            }
            for row in at * rows..(at + 1) * rows {
                let before = stored(row) - step.tokens;
                for token in 0..step.tokens {
                    limits[row * seq + token] = (before + token + 1) as i32;
                }
            }
            let stored: Vec<usize> = (at * rows..(at + 1) * rows).map(stored).collect();
            let most = stored.iter().copied().max().unwrap_or(0);
            entries.push(WatchEntry {
                id: step.id,
                tokens: step.tokens,
                stored,
                width: most.div_ceil(page_size).max(1) * page_size,
                is_due,
            });
        }
        let count = pages.len();
        Ok(Self {
            entries,
            pages: ints(pages, [count], device),
            limits: ints(limits, [batch.len(), rows, seq], device),
            width: of_row * page_size,
        })
    }
}

/// What attention of a step's rows left.
pub(super) struct Rows<'a> {
    /// `[batch, heads, s, d_k]`
    pub query: &'a Tensor<4>,
    /// `[batch, heads, s]`, where scores are sums.
    pub lse: Option<Tensor<3>>,
    /// `[batch, kv_heads, s, d_k]`, if they see only each other.
    pub key: Option<Tensor<4>>,
}

impl<'a> Rows<'a> {
    /// Queries alone, for scores that are not of attention.
    pub(super) fn of(query: &'a Tensor<4>) -> Self {
        Self {
            query,
            lse: None,
            key: None,
        }
    }
}

impl Layer<'_> {
    /// Takes what eviction has to know from a step's rows, whose keys are in the pages.
    pub(super) fn watch(
        &self,
        rows: Rows<'_>,
        store: &Store,
        watch: &Watch,
        evictor: &mut Evictor,
        layer: usize,
    ) -> Result<(), TransformerError> {
        let score = evictor.config.score;
        let is_due = watch.entries.iter().any(|entry| entry.is_due);
        let keys = match (score, &rows.key) {
            (EvictionScore::Custom, _) => return Ok(()),
            (EvictionScore::Sum | EvictionScore::Mean, None) => Some(self.keys(store, watch)?),
            (EvictionScore::Sum | EvictionScore::Mean, Some(_)) => None,
            _ if is_due => Some(self.keys(store, watch)?),
            _ => None,
        };
        let rollback = evictor.rollback;
        match (score, &rows.key) {
            (EvictionScore::Sum | EvictionScore::Mean, None) => {
                let (Some(keys), Some(lse)) = (&keys, rows.lse.clone()) else {
                    return Ok(());
                };
                let attention = self.attention_of(rows.query, keys, lse, &watch.limits);
                for (at, entry) in watch.entries.iter().enumerate() {
                    let [_, kv_heads, seq, width] = attention.dims();
                    let own = attention.clone().narrow(0, at, 1);
                    let own = own.reshape([kv_heads, seq, width]);
                    let own = own.narrow(1, 0, entry.tokens).narrow(2, 0, entry.width);
                    evictor.watched(layer, entry.id).add(own, rollback);
                }
            }
            (EvictionScore::Sum | EvictionScore::Mean, Some(key)) => {
                let Some(lse) = &rows.lse else {
                    return Ok(());
                };
                for (at, entry) in watch.entries.iter().enumerate() {
                    let (sums, recent) =
                        self.prompt_sums([rows.query, key], lse, at, entry, rollback)?;
                    let watched = evictor.watched(layer, entry.id);
                    watched.begin(sums, recent, entry.tokens.min(rollback));
                }
            }
            (EvictionScore::LastRow | EvictionScore::Votes { .. }, _) => {
                let window = match score {
                    EvictionScore::Votes { window, .. } => window,
                    _ => 1,
                };
                for (at, entry) in watch.entries.iter().enumerate() {
                    let [_, heads, seq, width] = rows.query.dims();
                    let own = rows.query.clone().narrow(0, at, 1);
                    let own = own.reshape([heads, seq, width]).narrow(1, 0, entry.tokens);
                    let watched = evictor.watched(layer, entry.id);
                    watched.remember(own, window + rollback, rollback);
                }
            }
            _ => {}
        }
        if !is_due {
            return Ok(());
        }
        for (at, entry) in watch.entries.iter().enumerate() {
            if !entry.is_due {
                continue;
            }
            let own = keys.as_ref().map(|keys| {
                let [_, kv_heads, _, width] = keys.dims();
                let own = keys.clone().narrow(0, at, 1).narrow(2, 0, entry.width);
                own.reshape([kv_heads, entry.width, width])
            });
            let watched = evictor.watched(layer, entry.id);
            let scores = match (score, own) {
                (EvictionScore::Sum | EvictionScore::Mean, _) => watched.total(),
                (EvictionScore::KeyNorm, Some(keys)) => {
                    let squares = keys.clone() * keys;
                    let [kv_heads, slots, _] = squares.dims();
                    Some(squares.sum_dim(2).sqrt().neg().reshape([kv_heads, slots]))
                }
                (EvictionScore::LastRow | EvictionScore::Votes { .. }, Some(keys)) => {
                    let window = match score {
                        EvictionScore::Votes { window, .. } => window,
                        _ => 1,
                    };
                    (watched.queries.clone()).map(|queries| {
                        let [_, rows, _] = queries.dims();
                        let from = rows.saturating_sub(window);
                        let queries = queries.narrow(1, from, rows - from);
                        self.votes(queries, keys, &entry.stored)
                    })
                }
                _ => None,
            };
            watched.scores = scores.map(|scores| {
                let [_, slots] = scores.dims();
                let most = entry.stored.iter().copied().max().unwrap_or(0);
                scores.narrow(1, 0, most.min(slots)).cast(FloatDType::F32)
            });
        }
        Ok(())
    }

    /// Keys of the pages of a step's sequences, `[batch, kv_heads, slots, d_k]`, in the dtype of sums.
    fn keys(&self, store: &Store, watch: &Watch) -> Result<Tensor<4>, TransformerError> {
        let keys = store.keys_of(&watch.pages)?;
        let [_, _, width] = keys.dims();
        let shape = [watch.entries.len(), self.n_kv_heads(), watch.width, width];
        let keys = keys.reshape(shape);
        let dtype = accumulate_in(keys.dtype().into());
        Ok(keys.cast(dtype))
    }

    pub(super) fn scale(&self, width: usize) -> f64 {
        (self.attention_options().scale).unwrap_or_else(|| 1.0 / (width as f64).sqrt())
    }

    /// The attention of rows to all slots, summed over the heads that share a KV head: `[batch, kv_heads, s, slots]`.
    fn attention_of(
        &self,
        query: &Tensor<4>,
        keys: &Tensor<4>,
        lse: Tensor<3>,
        limits: &Tensor<3, Int>,
    ) -> Tensor<4> {
        let [batch, heads, seq, width] = query.dims();
        let [_, kv_heads, slots, _] = keys.dims();
        let group = heads / kv_heads;
        let sums = FloatDType::from(keys.dtype());
        let q = query.clone().cast(sums) * self.scale(width);
        let q = q.reshape([batch, kv_heads, group * seq, width]);
        let scores = self.capped(q.matmul(keys.clone().swap_dims(2, 3)));
        let scores = scores.reshape([batch, kv_heads, group, seq, slots]);
        let lse = lse.cast(sums).reshape([batch, kv_heads, group, seq, 1]);
        let [_, rows, _] = limits.dims();
        let limits = limits.clone().reshape([batch, rows, 1, seq, 1]);
        let places = Tensor::<1, Int>::arange(0..slots as i64, (&query.device(), limits.dtype()));
        let is_hidden = places.reshape([1, 1, 1, 1, slots]).greater_equal(limits);
        let is_hidden = is_hidden.expand([batch, kv_heads, group, seq, slots]);
        let attention = (scores - lse).exp().mask_fill(is_hidden, 0.0);
        attention.sum_dim(2).reshape([batch, kv_heads, seq, slots])
    }

    /// The attention that a prompt's rows, of a batch entry, gave each of its keys: summed `[kv_heads, slots]` over those that cannot be taken back, and of
    /// the others each one's `[kv_heads, rows, slots]`.
    fn prompt_sums(
        &self,
        [query, key]: [&Tensor<4>; 2],
        lse: &Tensor<3>,
        at: usize,
        entry: &WatchEntry,
        rollback: usize,
    ) -> Result<(Option<Tensor<2>>, Option<Tensor<3>>), TransformerError> {
        let loose = entry.tokens.min(rollback);
        let settled = entry.tokens - loose;
        let kv_heads = self.n_kv_heads();
        let part = |x: &Tensor<4>, first, rows| x.clone().narrow(0, at, 1).narrow(2, first, rows);
        let lse = |first, rows| lse.clone().narrow(0, at, 1).narrow(2, first, rows);
        let sums = match settled {
            0 => None,
            _ => {
                // Later keys are none that these queries see.
                let (q, k) = (part(query, 0, settled), part(key, 0, settled));
                let layout = self.layout(settled, settled)?;
                let options = AccumulatedAttentionOptions::default()
                    .attention(self.attention_options().clone());
                let attention_sums =
                    accumulated_attention(q, k, lse(0, settled), &layout, options)?;
                let [_, heads, _] = attention_sums.columns.dims();
                let columns = attention_sums.columns;
                let columns = columns.reshape([kv_heads, heads / kv_heads, settled]);
                let columns = columns.sum_dim(1).reshape([kv_heads, settled]);
                Some(fit(columns, entry.width))
            }
        };
        let recent = match loose {
            0 => None,
            _ => {
                let keys = part(key, 0, entry.tokens);
                let dtype = accumulate_in(keys.dtype().into());
                let limits = (settled + 1..=entry.tokens).map(|limit| limit as i32);
                let limits = ints(limits.collect(), [1, 1, loose], &keys.device());
                let q = part(query, settled, loose);
                let lse = lse(settled, loose);
                let rows = self.attention_of(&q, &keys.cast(dtype), lse, &limits);
                let rows = rows.reshape([kv_heads, loose, entry.tokens]);
                Some(fit(rows, entry.width))
            }
        };
        Ok((sums, recent))
    }

    /// The mean attention of the newest queries `[heads, m, d_k]` of a sequence to its slots, over the heads that share a KV head: `[kv_heads, slots]`.
    fn votes(&self, queries: Tensor<3>, keys: Tensor<3>, stored: &[usize]) -> Tensor<2> {
        let [heads, rows, width] = queries.dims();
        let [kv_heads, slots, _] = keys.dims();
        let group = heads / kv_heads;
        let device = queries.device();
        let sums = FloatDType::from(keys.dtype());
        // The newest query sees all slots, each one before it a slot less.
        let limits = stored.iter().flat_map(|&stored| {
            (0..rows).map(move |row| (stored + row + 1).saturating_sub(rows).max(1) as i32)
        });
        let limits = ints(limits.collect(), [stored.len(), 1, rows, 1], &device);
        let q = queries.cast(sums) * self.scale(width);
        let q = q.reshape([kv_heads, group * rows, width]);
        let scores = self.capped(q.matmul(keys.swap_dims(1, 2)));
        let scores = scores.reshape([kv_heads, group, rows, slots]);
        let places = Tensor::<1, Int>::arange(0..slots as i64, (&device, limits.dtype()));
        let is_hidden = places.reshape([1, 1, 1, slots]).greater_equal(limits);
        let is_hidden = is_hidden.expand([kv_heads, group, rows, slots]);
        let scores = scores.mask_fill(is_hidden, HIDDEN);
        let top = scores.clone().max_dim(3);
        let sinks = self.sink_logits();
        let (top, sink) = match sinks {
            None => (top, None),
            Some(sinks) => {
                let sinks = sinks.cast(sums).reshape([kv_heads, group, 1, 1]);
                let sinks = sinks.expand([kv_heads, group, rows, 1]);
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
        let attention = (weights / total).reshape([kv_heads, group * rows, slots]);
        attention.mean_dim(1).reshape([kv_heads, slots])
    }

    pub(super) fn capped<const D: usize>(&self, scores: Tensor<D>) -> Tensor<D> {
        match self.attention_options().softcap {
            Some(softcap) => (scores / softcap).tanh() * softcap,
            None => scores,
        }
    }
}

impl Watched {
    /// Takes the attention of a prompt's rows.
    fn begin(&mut self, sums: Option<Tensor<2>>, recent: Option<Tensor<3>>, loose: usize) {
        (self.sums, self.recent, self.loose) = (sums, recent, loose);
    }

    /// Adds the attention of new rows, `[kv_heads, rows, slots]`; of the newest, which may be taken back, it is kept apart. Sums and rows are then as wide as
    /// this: slots that came since have zeros, and those that are no more had nothing but zeros.
    fn add(&mut self, attention: Tensor<3>, rollback: usize) {
        let [_, new, slots] = attention.dims();
        let all = match self.recent.take() {
            Some(recent) => Tensor::cat(vec![fit(recent, slots), attention], 1),
            None => attention,
        };
        let [kv_heads, rows, _] = all.dims();
        let settled = rows.saturating_sub(rollback);
        let mut sums = self.sums.take().map(|sums| fit(sums, slots));
        if settled > 0 {
            let more = all.clone().narrow(1, 0, settled).sum_dim(1);
            let more = more.reshape([kv_heads, slots]);
            sums = Some(match sums {
                Some(sums) => sums + more,
                None => more,
            });
        }
        self.sums = sums;
        self.recent = (rows > settled).then(|| all.narrow(1, settled, rows - settled));
        self.loose = rollback.min(self.loose + new);
    }

    /// What all rows gave the keys.
    pub(super) fn total(&self) -> Option<Tensor<2>> {
        let recent = self.recent.clone().map(|recent| {
            let [kv_heads, _, slots] = recent.dims();
            recent.sum_dim(1).reshape([kv_heads, slots])
        });
        match (self.sums.clone(), recent) {
            (Some(sums), Some(recent)) => Some(sums + recent),
            (sums, recent) => sums.or(recent),
        }
    }

    /// Remembers new queries `[heads, rows, d_k]`, and of all of them the newest.
    fn remember(&mut self, queries: Tensor<3>, most: usize, rollback: usize) {
        let [_, new, _] = queries.dims();
        let all = match self.queries.take() {
            Some(before) if new < most => Tensor::cat(vec![before, queries], 1),
            _ => queries,
        };
        let [_, rows, _] = all.dims();
        let kept = rows.min(most);
        self.queries = Some(all.narrow(1, rows - kept, kept));
        self.loose = rollback.min(self.loose + new);
    }
}
