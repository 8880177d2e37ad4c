//! Attention of new rows to the keys and values of a pool.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_blocksparse::{AttentionOptions, merge_attention};
use burn_sparse_transformer::TransformerError;
use burn_sparse_transformer::decoder::Positions;
use burn_sparse_transformer::internal::rotate_back;

use super::choice::Shared;
use super::layer::Layer;
use super::step::{Gathered, PageLists, Road};
use super::store::{Store, as_stored, lost};
use super::{KvPool, LayerPages, Step, watch};
use crate::summaries::select_pages;
use crate::{PagedKeysValues, PagedOptions, PagedOutput, PagedStore, paged_attention};

/// Lower bound of a row's maximum, for rows without keys; above the scores of masked pairs.
const LOWEST: f64 = -1e29;

impl Layer<'_> {
    /// Returns the heads' outputs for a step's rows `x`, in layer `layer` of a pool.
    pub(super) fn attend_step(
        &self,
        x: Tensor<3>,
        pool: &mut KvPool,
        (step, shared): (&Step, &mut Shared),
        layer: usize,
    ) -> Result<Tensor<4>, TransformerError> {
        shared.begin(self.choice_sharing());
        if let Some(nsa) = self.nsa() {
            return self.nsa_step(x, nsa, pool, step, layer);
        }
        if pool.layers[layer].index.is_some() {
            return self.indexed_step(x, pool, (step, shared), layer);
        }
        let [query, key, value] = self.project_heads(x, &step.positions)?;
        let LayerPages {
            group: at, store, ..
        } = &mut pool.layers[layer];
        let (group, evictor) = (&step.groups[*at], pool.evictor.as_mut());
        group.write(store, [key.clone(), value.clone()])?;
        let mut rows = watch::Rows::of(&query);
        let watched = step.watch.as_ref().zip(evictor);
        let heads = match &group.road {
            // Eviction by attention excludes selection by content.
            Road::Dense(_) if watched.is_some() && !self.chooses() => {
                let heads = [query.clone(), key.clone(), value];
                let (heads, lse) = self.attend_sequences_with_lse(heads)?;
                (rows.lse, rows.key) = (Some(lse), Some(key));
                heads
            }
            Road::Dense(lengths) => {
                let heads = [query.clone(), key, value];
                self.attend_sequences(heads, lengths.as_deref(), &mut shared.prompt)?
            }
            Road::Paged(page_lists) => match (self.choosing_indexer(), &page_lists.choice) {
                (None, None) => {
                    let attended = self.attend_pages(query.clone(), store.pages()?, page_lists)?;
                    rows.lse = Some(attended.lse);
                    attended.out
                }
                (indexer, choice) => {
                    let (kv_heads, told) = (self.n_kv_heads(), (&**page_lists, shared));
                    self.attend_chosen(query.clone(), store, told, |rows, _, lists| {
                        // Without an indexer of its own, the layer reuses an earlier layer's selection.
                        let choice = choice.as_ref().filter(|_| indexer.is_none());
                        let choice = choice.ok_or_else(lost)?;
                        let (rows, summaries) = (rows.clone(), store.summaries()?);
                        let (table, spans) = (&lists.table, &lists.spans);
                        let chosen = select_pages(rows, summaries, kv_heads, table, spans, choice);
                        Ok(chosen?)
                    })?
                }
            },
            Road::Gathered(gathered) => {
                return self.attend_gathered(query.clone(), store, gathered);
            }
        };
        if let Some((watch, evictor)) = watched {
            let lists = match &group.road {
                Road::Paged(page_lists) => Some(&**page_lists),
                _ => None,
            };
            self.watch(rows, store, (watch, lists), evictor, (layer, *at))?;
        }
        Ok(heads.cast(FloatDType::from(query.dtype())))
    }

    pub(super) fn paged_options(&self) -> PagedOptions {
        let AttentionOptions { scale, softcap, .. } = *self.attention_options();
        PagedOptions {
            scale,
            softcap,
            sinks: self.sink_logits(),
            ..PagedOptions::default()
        }
    }

    pub(super) fn attend_pages(
        &self,
        query: Tensor<4>,
        store: PagedStore,
        page_lists: &PageLists,
    ) -> Result<PagedOutput, TransformerError> {
        let mut options = self.paged_options();
        let query = as_stored(query, &store);
        let pages = page_lists.pages(store.clone(), self.n_kv_heads());
        let mut attended = paged_attention(query.clone(), &pages, &options)?;
        // Sink logits count once.
        options.sinks = None;
        if let Some(sinks) = &page_lists.sinks {
            let far = match &self.rope {
                Some(rope) => {
                    let by = Positions::Listed(Box::new(sinks.left_out.clone()));
                    rotate_back(rope, query, &by)?
                }
                None => query,
            };
            let spans = sinks.spans.clone();
            let pages = PagedKeysValues { spans, ..pages };
            let PagedOutput { out, lse, .. } = paged_attention(far, &pages, &options)?;
            (attended.out, attended.lse) = merge_attention(attended.out, attended.lse, out, lse)?;
            return Ok(attended);
        }
        let Some(prefix) = &page_lists.prefix else {
            return Ok(attended);
        };
        // All queries of the batch are rows of one sequence.
        let [batch, heads, seq, width] = query.dims();
        let rows = query
            .swap_dims(0, 1)
            .reshape([1, heads, batch * seq, width]);
        let pages = prefix.pages(store, self.n_kv_heads());
        let shared = paged_attention(rows, &pages, &options)?;
        let [.., width] = shared.out.dims();
        let out = shared.out.reshape([heads, batch, seq, width]);
        let lse = shared.lse.reshape([heads, batch, seq]);
        (attended.out, attended.lse) = merge_attention(
            attended.out,
            attended.lse,
            out.swap_dims(0, 1),
            lse.swap_dims(0, 1),
        )?;
        Ok(attended)
    }

    /// Computes attention in Burn's primitives, in the accumulation dtype.
    pub(super) fn attend_gathered(
        &self,
        query: Tensor<4>,
        store: &Store,
        gathered: &Gathered,
    ) -> Result<Tensor<4>, TransformerError> {
        let dtype = FloatDType::from(query.dtype());
        let sums = accumulate_in(dtype);
        let [batch, heads, seq, width] = query.dims();
        let (kv_heads, count) = (self.n_kv_heads(), gathered.count);
        let [_, value_width] = store.widths().unwrap_or_default();
        if count == 0 {
            let shape = [batch, heads, seq, value_width];
            return Ok(Tensor::zeros(shape, (&query.device(), DType::from(dtype))));
        }
        let [keys, values] = (store.gather(&gathered.ids, sums)?).map(|rows| {
            let [_, width] = rows.dims();
            rows.reshape([batch, kv_heads, count, width])
        });
        let group = [batch, kv_heads, heads / kv_heads * seq, width];
        let q = (query.clone().cast(sums) * self.scale(width)).reshape(group);
        let scores = q.matmul(keys.swap_dims(2, 3));
        let scores = self.capped(scores.reshape([batch, heads, seq, count]));
        let mut scores = scores + gathered.bias.clone().cast(sums);
        if let (Some(table), Some(places)) = (&self.relative_bias, &gathered.distances) {
            let table = table.val().cast(sums);
            let numbers = table.shape().num_elements();
            let biases = table.reshape([numbers]).select(0, places.clone());
            scores = scores + biases.reshape([batch, heads, seq, count]);
        }
        if let Some(sinks) = self.sink_logits() {
            let sinks = sinks.cast(sums).reshape([1, heads, 1, 1]);
            scores = Tensor::cat(vec![scores, sinks.expand([batch, heads, seq, 1])], 3);
        }
        let top = scores.clone().max_dim(3).clamp_min(LOWEST);
        let weights = (scores - top).exp();
        let total = weights.clone().sum_dim(3).clamp_min(f32::MIN_POSITIVE);
        let weights = weights.narrow(3, 0, count);
        let group = [batch, kv_heads, heads / kv_heads * seq, count];
        let out = weights.reshape(group).matmul(values);
        let out = out.reshape([batch, heads, seq, value_width]) / total;
        Ok(out.cast(dtype))
    }
}
