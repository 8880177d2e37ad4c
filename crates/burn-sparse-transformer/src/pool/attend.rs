//! Attention of new rows to what a pool holds.

use burn::module::Param;
use burn::tensor::{DType, FloatDType, Tensor};
use burn_blocksparse::layout::PaddingMask;
use burn_blocksparse::merge_attention;
use burn_paged_attention::{PagedOptions, PagedOutput, PagedStore, paged_attention};
use burn_sparse_select::Selection;

use super::step::{Gathered, Road, Walk};
use super::store::Store;
use super::{KvPool, Step, watch};
use crate::call::Call;
use crate::heads::{Positions, rotate_back};
use crate::layouts::Request;
use crate::stream::Projected;
use crate::{SparseMhaInput, SparseMultiHeadAttention, TransformerError};

/// Where the scores of rows without keys are, and above those of pairs that do not count.
const LOWEST: f64 = -1e29;

/// Queries in the dtype of keys that are floats.
pub(super) fn as_stored(query: Tensor<4>, store: &PagedStore) -> Tensor<4> {
    match store {
        PagedStore::Plain { keys, .. } => query.cast(FloatDType::from(keys.dtype())),
        PagedStore::Quantized(_) => query,
    }
}

impl SparseMultiHeadAttention {
    /// Attention of a step's rows in layer `layer` of a pool, without the output's bias.
    pub(crate) fn forward_pool_projected(
        &self,
        input: SparseMhaInput,
        pool: &mut KvPool,
        step: &Step,
        layer: usize,
    ) -> Result<Projected, TransformerError> {
        if let Some(nsa) = self.nsa() {
            let context = self.nsa_pool_context(input, nsa, pool, step, layer)?;
            return self.output_product(context);
        }
        if let Some(dsa) = self.choosing_dsa() {
            let context = self.dsa_pool_context(input, dsa, pool, step, layer)?;
            return self.output_product(context);
        }
        let call = Call::at(&input, step.rows.positions.clone())?;
        let (query, key, value) = self.project(input, &call)?;
        let (store, group, evictor) = pool.layer(step, layer);
        if cfg!(debug_assertions) {
            store.poison(&group.freed, self.n_kv_heads / group.slots.dims()[1]);
        }
        let pair = [key.clone(), value.clone()];
        store.write(group.copies.as_ref(), pair, group.slots.clone())?;
        let context = match &group.road {
            Road::Dense(lengths) => {
                let heads = (query.clone(), key.clone(), value.clone());
                let chosen = self.attend_prompts(heads, lengths.as_deref(), &call)?;
                if let Some(context) = chosen {
                    if let (Some(watch), Some(evictor)) = (&group.watch, evictor) {
                        // No score that a choice goes with is of attention.
                        self.watch(watch::Rows::of(&query), store, watch, evictor, layer)?;
                    }
                    return self.output_product(context);
                }
                let [_, _, seq, _] = query.dims();
                let layout = self.layouts.get(&Request::new(seq, seq))?;
                match (&group.watch, evictor) {
                    (Some(watch), Some(evictor)) => {
                        let heads = (query.clone(), key.clone(), value);
                        let (context, lse) = self.attend_with_lse(heads, &layout, &call)?;
                        let rows = watch::Rows {
                            query: &query,
                            lse: Some(lse),
                            key: Some(key),
                        };
                        self.watch(rows, store, watch, evictor, layer)?;
                        context
                    }
                    _ => self.attend((query, key, value), &layout, &call)?,
                }
            }
            Road::Paged(walk) if walk.choice.is_some() => {
                let out = self.attend_chosen_pages(query.clone(), store, walk)?;
                if let (Some(watch), Some(evictor)) = (&group.watch, evictor) {
                    self.watch(watch::Rows::of(&query), store, watch, evictor, layer)?;
                }
                out.cast(FloatDType::from(query.dtype()))
            }
            Road::Paged(walk) => {
                let attended = self.attend_pages(query.clone(), store.pages()?, walk)?;
                if let (Some(watch), Some(evictor)) = (&group.watch, evictor) {
                    let rows = watch::Rows {
                        query: &query,
                        lse: Some(attended.lse),
                        key: None,
                    };
                    self.watch(rows, store, watch, evictor, layer)?;
                }
                attended.out.cast(FloatDType::from(query.dtype()))
            }
            Road::Gathered(gathered) => self.attend_gathered(query, store, gathered)?,
        };
        self.output_product(context)
    }

    /// Attention of prompts, all of a length or of these, whose keys are chosen by content. None without a choice.
    fn attend_prompts(
        &self,
        heads: (Tensor<4>, Tensor<4>, Tensor<4>),
        lengths: Option<&[usize]>,
        call: &Call,
    ) -> Result<Option<Tensor<4>>, TransformerError> {
        let [_, _, seq, _] = heads.0.dims();
        let mut request = Request::new(seq, seq);
        // Rows behind a prompt are none, and take no part in its choice; where later ones have no part anyway, nothing has to be cut.
        let is_stable = |selection: &Selection| selection.estimator().traits().prefix_stable;
        if let Some(lengths) = lengths.filter(|_| !self.selection().is_some_and(is_stable)) {
            let entry = |&length: &usize| {
                let real: Vec<bool> = (0..seq).map(|row| row < length).collect();
                PaddingMask::default().queries(real.clone()).keys(real)
            };
            request.restrictions = lengths.iter().map(entry).collect();
        }
        if let Some(by_head) = self.head_selections() {
            let context = self.attend_by_heads(heads, by_head, &request, call);
            return context.map(Some);
        }
        let Some(selection) = self.selection() else {
            return Ok(None);
        };
        let cut = self.cut(selection, &request)?;
        let context = self.attend_chosen(heads, selection, &cut, call);
        context.map(Some)
    }

    pub(super) fn paged_options(&self, query: &Tensor<4>) -> PagedOptions {
        let mut options = PagedOptions::default();
        options.scale = self.options.scale;
        options.softcap = self.options.softcap;
        options.sinks = self.sinks_of(query);
        options
    }

    pub(super) fn attend_pages(
        &self,
        query: Tensor<4>,
        store: PagedStore,
        walk: &Walk,
    ) -> Result<PagedOutput, TransformerError> {
        let mut options = self.paged_options(&query);
        let query = as_stored(query, &store);
        let pages = walk.pages(store.clone(), self.n_kv_heads);
        let mut attended = paged_attention(query.clone(), &pages, &options)?;
        // Sinks that are no keys count once.
        options.sinks = None;
        if let Some(sinks) = &walk.sinks {
            let dtype = FloatDType::from(query.dtype());
            let far = match &self.rope {
                Some(rope) => {
                    let by = Positions::Listed(Box::new(sinks.left_out.clone()));
                    rotate_back(rope, query, &by)?.cast(dtype)
                }
                None => query,
            };
            let pages = sinks.pages(walk, store, self.n_kv_heads);
            let PagedOutput { out, lse, .. } = paged_attention(far, &pages, &options)?;
            (attended.out, attended.lse) = merge_attention(attended.out, attended.lse, out, lse)?;
            return Ok(attended);
        }
        let Some(prefix) = &walk.prefix else {
            return Ok(attended);
        };
        // All queries of the batch are rows of one sequence.
        let [batch, heads, seq, width] = query.dims();
        let rows = query
            .swap_dims(0, 1)
            .reshape([1, heads, batch * seq, width]);
        let pages = prefix.pages(store, self.n_kv_heads);
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

    /// Attention in Burn's primitives, in the dtype of sums.
    pub(super) fn attend_gathered(
        &self,
        query: Tensor<4>,
        store: &Store,
        gathered: &Gathered,
    ) -> Result<Tensor<4>, TransformerError> {
        let dtype = FloatDType::from(query.dtype());
        let sums = match query.dtype() {
            DType::F64 => FloatDType::F64,
            _ => FloatDType::F32,
        };
        let [batch, heads, seq, width] = query.dims();
        let (kv_heads, count) = (self.n_kv_heads, gathered.count);
        let [_, value_width] = store.widths().unwrap_or_default();
        if count == 0 {
            let shape = [batch, heads, seq, value_width];
            return Ok(Tensor::zeros(shape, (&query.device(), DType::from(dtype))));
        }
        let [keys, values] = (store.gather(&gathered.ids, sums)?).map(|rows| {
            let [_, width] = rows.dims();
            rows.reshape([batch, kv_heads, count, width])
        });
        let scale = (self.options.scale).unwrap_or_else(|| 1.0 / (width as f64).sqrt());
        let group = [batch, kv_heads, heads / kv_heads * seq, width];
        let q = (query.clone().cast(sums) * scale).reshape(group);
        let scores = q.matmul(keys.swap_dims(2, 3));
        let mut scores = scores.reshape([batch, heads, seq, count]);
        if let Some(softcap) = self.options.softcap {
            scores = (scores / softcap).tanh() * softcap;
        }
        scores = scores + gathered.bias.clone().cast(sums);
        if let (Some(table), Some(places)) = (&self.relative_bias, &gathered.distances) {
            let table = table.val().cast(sums);
            let numbers = table.shape().num_elements();
            let biases = table.reshape([numbers]).select(0, places.clone());
            scores = scores + biases.reshape([batch, heads, seq, count]);
        }
        if let Some(sinks) = self.sinks_of(&query) {
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

    pub(super) fn sinks_of(&self, query: &Tensor<4>) -> Option<Tensor<1>> {
        match &self.sinks {
            None if self.quiet_softmax => Some(Tensor::zeros([self.n_heads], &query.device())),
            sinks => sinks.as_ref().map(Param::val),
        }
    }
}
