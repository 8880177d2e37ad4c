//! Eviction of keys by score.

use burn::tensor::{FloatDType, Tensor};
use burn_sparse_transformer::SparseMultiHeadAttention;

use super::layer::Layer;
use super::step::GroupKey;
use super::store::ints;
use super::{Group, KvPool, KvStep};
use crate::PoolError;
use crate::pages::{
    ALWAYS, CacheError, EvictionScore, KvRetention, PagePool, Retained, SequenceId,
};

/// Checks that keys of such layers can be evicted.
pub(super) fn check(key: &GroupKey, books: &PagePool) -> Result<(), PoolError> {
    blocksparse::ensure! { PoolError; key.is_plain() => "eviction", "none with ALiBi or biases of distances", "some"; }
    books.clone().join(KvRetention::Evict)?;
    Ok(())
}

/// Number of elements of keys and values that are in memory at a time, besides the pages.
const AT_ONCE: usize = 1 << 26;

/// Keys of a layer that are retained, per KV head.
struct Kept {
    /// Indices among the slots of the head's row.
    places: Vec<Vec<usize>>,
    /// Rows among those of all pages.
    ids: Vec<Vec<i32>>,
}

/// Retained keys of a sequence, and their new slots.
struct Moves {
    id: SequenceId,
    /// One per layer.
    kept: Vec<Kept>,
    /// One per group of layers.
    retained: Vec<Retained>,
}

impl Moves {
    /// Returns the largest number of keys that a head of a layer retains.
    fn most(&self, layer: usize) -> usize {
        let places = self.kept[layer].places.iter();
        places.map(Vec::len).max().unwrap_or(0)
    }
}

impl KvPool {
    /// Returns, for each sequence of a step, whether its keys are evicted after it.
    pub(super) fn due(&self, steps: &[KvStep]) -> Result<Vec<bool>, PoolError> {
        let Some(config) = self.evictor.as_ref().map(|evictor| evictor.config) else {
            return Ok(vec![false; steps.len()]);
        };
        let mut due = Vec::with_capacity(steps.len());
        for step in steps {
            let (mut stored, mut heads) = (0, 0);
            for layer in &self.layers {
                let Group { key, books, .. } = &self.groups[layer.group];
                let of_row = key.kv_heads / books.table_rows();
                stored += books.stored(step.id)? * of_row;
                heads += key.kv_heads;
            }
            let most = (config.capacity() + config.slack).saturating_mul(heads);
            due.push(stored > most && config.score != EvictionScore::Custom);
        }
        Ok(due)
    }

    /// Updates the eviction state after a call, and evicts keys of the sequences that are due. Nothing is evicted after an error.
    pub(crate) fn settle(
        &mut self,
        steps: &[KvStep],
        layers: &[&SparseMultiHeadAttention],
    ) -> Result<(), PoolError> {
        let Some(evictor) = &mut self.evictor else {
            return Ok(());
        };
        evictor.stepped(steps);
        let due = self.due(steps)?;
        let due = steps.iter().zip(due).filter(|(_, is_due)| *is_due);
        let due: Vec<SequenceId> = due.map(|(step, _)| step.id).collect();
        if due.is_empty() {
            return Ok(());
        }
        let scores = self.scores_of(&due, layers)?;
        let chosen = due.into_iter().zip(scores);
        let chosen = chosen.map(|(id, scores)| Ok((id, self.choose(id, &scores)?)));
        let chosen = chosen.collect::<Result<_, PoolError>>()?;
        self.evict_chosen(chosen)
    }

    /// Returns the scores of the keys, by sequence, layer and KV head. A layer's sequences are computed together, and copied to the host with those
    /// of other layers.
    fn scores_of(
        &self,
        ids: &[SequenceId],
        layers: &[&SparseMultiHeadAttention],
    ) -> Result<Vec<Vec<Vec<Vec<f32>>>>, PoolError> {
        let lost = || PoolError::argument("pool", "one whose last call succeeded", "another");
        let evictor = self.evictor.as_ref().ok_or_else(lost)?;
        let mut found = Vec::with_capacity(ids.len());
        for ids in ids.chunks(self.at_once(self.groups.iter().map(|group| &group.books), ids)?) {
            let (mut shapes, mut all) = (Vec::new(), Vec::new());
            for (layer, (pages, mha)) in self.layers.iter().zip(layers).enumerate() {
                let books = &self.groups[pages.group].books;
                let scores = Layer(mha).worth(&pages.store, books, evictor, layer, ids)?;
                let scores = scores.ok_or_else(lost)?;
                let [rows, slots] = scores.dims();
                shapes.push([rows / ids.len(), slots]);
                all.push(scores.reshape([rows * slots]));
            }
            let all = Tensor::cat(all, 0).into_data();
            let all: Vec<f32> = all
                .try_into_vec()
                .map_err(|error| PoolError::argument("scores", "numbers", format!("{error:?}")))?;
            for at in 0..ids.len() {
                let mut rest = all.as_slice();
                let of_layers = shapes.iter().map(|&[heads, slots]| {
                    let (own, after) = rest.split_at(ids.len() * heads * slots);
                    rest = after;
                    let own = &own[at * heads * slots..][..heads * slots];
                    own.chunks(slots.max(1)).map(<[f32]>::to_vec).collect()
                });
                found.push(of_layers.collect());
            }
        }
        Ok(found)
    }

    /// Returns the number of sequences whose keys and values of a layer fit in [`AT_ONCE`], at least one.
    fn at_once<'a>(
        &self,
        mut books: impl Iterator<Item = &'a PagePool>,
        ids: &[SequenceId],
    ) -> Result<usize, CacheError> {
        let slots = books.try_fold(0, |most, books| {
            let spans = books.spans(ids)?;
            let slots = spans.chunks(4).map(|span| span[0] as usize);
            Ok::<_, CacheError>(most.max(slots.max().unwrap_or(0)))
        })?;
        let widths = self.layers.iter().map(|layer| {
            let widths = layer.store.widths().unwrap_or_default();
            self.groups[layer.group].key.kv_heads * widths.iter().sum::<usize>()
        });
        let of_sequence = slots * widths.max().unwrap_or(0);
        Ok((AT_ONCE / of_sequence.max(1)).max(1))
    }

    /// Selects the slots of each layer and KV head of a sequence that are retained.
    fn choose(
        &self,
        id: SequenceId,
        scores: &[Vec<Vec<f32>>],
    ) -> Result<Vec<Vec<Vec<usize>>>, PoolError> {
        let Some(evictor) = &self.evictor else {
            return Ok(Vec::new());
        };
        let config = &evictor.config;
        let len = self.len(id)?;
        let capacities = config.layer_capacities(self.layers.len(), len)?;
        let mut chosen = Vec::with_capacity(self.layers.len());
        for (layer, (pages, scores)) in self.layers.iter().zip(scores).enumerate() {
            let Group { key, books, .. } = &self.groups[pages.group];
            let stored = stored_of_heads(books, id, key.kv_heads)?;
            let group = (key.heads / key.kv_heads) as f32;
            let mut scores: Vec<Vec<f32>> = (scores.iter().zip(&stored))
                .map(|(scores, &stored)| scores[..stored].to_vec())
                .collect();
            if config.score == EvictionScore::Mean {
                let known = evictor.known(layer, id);
                for (head, scores) in scores.iter_mut().enumerate() {
                    for (slot, score) in scores.iter_mut().enumerate() {
                        *score /= group * (len - known.position(head, slot)) as f32;
                    }
                }
            }
            let scores: Vec<&[f32]> = scores.iter().map(Vec::as_slice).collect();
            chosen.push(config.choose(&scores, capacities[layer])?);
        }
        Ok(chosen)
    }

    /// Evicts all keys of sequences except those at the selected slots of each layer and KV head.
    fn evict_chosen(
        &mut self,
        chosen: Vec<(SequenceId, Vec<Vec<Vec<usize>>>)>,
    ) -> Result<(), PoolError> {
        let before: Vec<PagePool> = self
            .groups
            .iter()
            .map(|group| group.books.clone())
            .collect();
        let mut moves = Vec::with_capacity(chosen.len());
        for (id, chosen) in chosen {
            match self.retain(id, chosen) {
                Ok(of_sequence) => moves.push(of_sequence),
                Err(error) => {
                    for (group, books) in self.groups.iter_mut().zip(before) {
                        group.books = books;
                    }
                    return Err(error.into());
                }
            }
        }
        if let Some(evictor) = &mut self.evictor {
            evictor.evictions += 1;
        }
        // In order: a sequence may take pages that an earlier one freed.
        let ids: Vec<SequenceId> = moves.iter().map(|of_sequence| of_sequence.id).collect();
        let at_once = self.at_once(before.iter(), &ids)?;
        (moves.chunks(at_once)).try_for_each(|moves| self.rewrite(moves))
    }

    /// Updates the block tables for an eviction.
    fn retain(
        &mut self,
        id: SequenceId,
        chosen: Vec<Vec<Vec<usize>>>,
    ) -> Result<Moves, CacheError> {
        let mut kept = Vec::with_capacity(chosen.len());
        for (layer, places) in chosen.into_iter().enumerate() {
            let Group { key, books, .. } = &self.groups[self.layers[layer].group];
            let ids = ids_of(books, id, key.kv_heads, &places)?;
            kept.push(Kept { places, ids });
        }
        let mut retained = Vec::with_capacity(self.groups.len());
        for (at, group) in self.groups.iter_mut().enumerate() {
            let layer = self.layers.iter().position(|layer| layer.group == at);
            let heads_of_row = group.key.kv_heads / group.books.table_rows();
            let places = kept[layer.unwrap_or(0)].places.iter();
            let counts: Vec<usize> = places.step_by(heads_of_row).map(Vec::len).collect();
            group.uploaded = None;
            let of_group = group.books.retain(id, &counts)?;
            if let Some(sight) = group.sight.take() {
                // The remaining keys count as those of the last positions.
                let next = group.books.len(id)?;
                let places = of_group.slots.iter().flat_map(|slots| {
                    let positions = next - slots.len()..next;
                    slots
                        .iter()
                        .zip(positions)
                        .map(|(&slot, at)| (slot, at as i32, ALWAYS))
                });
                group.sight = Some(sight.write(places.collect(), &self.device));
            }
            retained.push(of_group);
        }
        Ok(Moves { id, kept, retained })
    }

    /// Moves the retained keys and values of sequences to their new slots. All are read before any is written.
    fn rewrite(&mut self, moves: &[Moves]) -> Result<(), PoolError> {
        let device = self.device.clone();
        let lengths = moves.iter().map(|of_sequence| self.len(of_sequence.id));
        let lengths = lengths.collect::<Result<Vec<_>, _>>()?;
        for (layer, pages) in self.layers.iter_mut().enumerate() {
            let (at, store) = (pages.group, &mut pages.store);
            let kv_heads = self.groups[at].key.kv_heads;
            let most = moves.iter().map(|of_sequence| of_sequence.most(layer));
            let most = most.max().unwrap_or(0);
            if most > 0 {
                let ids = moves.iter().flat_map(|of_sequence| {
                    let ids = &of_sequence.kept[layer].ids;
                    ids.iter().flat_map(move |ids| padded(ids, most, 0))
                });
                let from = ints(ids.collect(), [moves.len() * kv_heads * most], &device);
                // Requantizing dequantized rows is exact.
                let moved = store.gather(&from, store.dtype())?.map(|rows| {
                    let [_, width] = rows.dims();
                    rows.reshape([moves.len(), kv_heads, most, width])
                });
                let retained = || moves.iter().map(|of_sequence| &of_sequence.retained[at]);
                let rows = moves[0].retained[at].slots.len();
                let slots = retained().flat_map(|retained| &retained.slots);
                let slots = slots.flat_map(|slots| padded(slots, most, -1)).collect();
                let slots = ints(slots, [moves.len(), rows, most], &device);
                if cfg!(debug_assertions) {
                    for retained in retained() {
                        store.poison(&retained.freed, kv_heads / rows);
                    }
                }
                store.write(None, moved, slots)?;
            }
            if let Some(evictor) = &mut self.evictor {
                let kept = moves.iter().zip(&lengths).map(|(of_sequence, &len)| {
                    let places = of_sequence.kept[layer].places.as_slice();
                    (of_sequence.id, places, len)
                });
                evictor.keep(layer, &kept.collect::<Vec<_>>(), &device)?;
            }
        }
        Ok(())
    }

    /// Returns each key's sum of attention so far, `[kv_heads, slots]` for a layer and sequence, if eviction uses it.
    #[doc(hidden)]
    pub fn attention_sums(&self, id: SequenceId, layer: usize) -> Option<Tensor<2>> {
        let books = &self.groups[self.layers.get(layer)?.group].books;
        let slots = books.tables(&[id]).ok()?.most_slots;
        let len = books.len(id).ok()?;
        let evictor = self.evictor.as_ref()?;
        let total = evictor.total(layer, &[(id, len)], slots, &self.device);
        total.ok()?
    }

    /// Evicts keys of sequences down to the capacity, by the caller's scores of their tokens. The pool must have [`EvictionScore::Custom`], for
    /// example from `EvictionConfig::importance`. Nothing has changed after an error.
    ///
    /// # Shapes
    /// - `importance`: per layer `[sequences, kv_heads, tokens]`; scores of evicted tokens are ignored
    ///
    /// # Errors
    /// [`TransformerError::Argument`](burn_sparse_transformer::TransformerError::Argument) if the pool evicts by other scores, or shapes do not
    /// match; [`PoolError::Cache`] if a sequence is not in the pool, or there are too few pages to copy shared ones.
    pub fn evict(&mut self, ids: &[SequenceId], importance: &[Tensor<3>]) -> Result<(), PoolError> {
        let evictor = (self.evictor.as_ref())
            .filter(|evictor| evictor.config.score == EvictionScore::Custom)
            .ok_or_else(|| {
                let expected = "one whose keys are evicted by the caller's scores";
                PoolError::argument("pool", expected, "another")
            })?;
        self.groups[0].books.check_batch(ids)?;

        let layers = self.layers.len();
        blocksparse::ensure! { PoolError; importance.len() == layers => "importance", format!("one for each of the {layers} layers"), importance.len(); }
        let lengths = ids.iter().map(|&id| self.len(id));
        let lengths = lengths.collect::<Result<Vec<_>, _>>()?;
        let longest = lengths.into_iter().max().unwrap_or(0);
        let mut chosen: Vec<(SequenceId, Vec<Vec<Vec<f32>>>)> =
            ids.iter().map(|&id| (id, Vec::new())).collect();
        for (layer, importance) in importance.iter().enumerate() {
            let Group { key, books, .. } = &self.groups[self.layers[layer].group];
            let [batch, heads, tokens] = importance.dims();
            blocksparse::ensure! {
                PoolError;
                [batch, heads] == [ids.len(), key.kv_heads] && tokens >= longest => "importance",
                    format!("[{}, {}, at least {longest}]", ids.len(), key.kv_heads), format!("{:?}", importance.dims());
            }
            let numbers = importance.clone().cast(FloatDType::F32).into_data();
            let numbers: Vec<f32> = numbers.try_into_vec().map_err(|error| {
                PoolError::argument("importance", "numbers", format!("{error:?}"))
            })?;
            for (at, (id, scores)) in chosen.iter_mut().enumerate() {
                let stored = stored_of_heads(books, *id, heads)?;
                let known = evictor.known(layer, *id);
                let of_head = |(head, stored): (usize, usize)| {
                    let own = &numbers[(at * heads + head) * tokens..][..tokens];
                    let slots = 0..stored;
                    slots.map(|slot| own[known.position(head, slot)]).collect()
                };
                scores.push(stored.into_iter().enumerate().map(of_head).collect());
            }
        }
        let chosen = chosen.into_iter().map(|(id, scores)| {
            let chosen = self.choose(id, &scores)?;
            Ok((id, chosen))
        });
        let chosen = chosen.collect::<Result<Vec<_>, PoolError>>()?;
        self.evict_chosen(chosen)
    }

    /// Returns the positions of the keys that each KV head of a layer has stored for a sequence, ascending.
    ///
    /// # Errors
    /// [`PoolError::Cache`] if the sequence does not exist; [`TransformerError::Argument`](burn_sparse_transformer::TransformerError::Argument) if
    /// the layer does not exist, or the pool does not evict.
    pub fn retained_positions(
        &self,
        id: SequenceId,
        layer: usize,
    ) -> Result<Vec<Vec<usize>>, PoolError> {
        let layers = self.layers.len();
        blocksparse::ensure! { PoolError; layer < layers => "layer", format!("below {layers}"), layer; }
        let Some(evictor) = &self.evictor else {
            let expected = "one that evicts keys";
            return Err(PoolError::argument("pool", expected, "another"));
        };
        let Group { key, books, .. } = &self.groups[self.layers[layer].group];
        let stored = stored_of_heads(books, id, key.kv_heads)?;
        let known = evictor.known(layer, id);
        let heads = stored
            .into_iter()
            .enumerate()
            .map(|(head, stored)| (0..stored).map(|slot| known.position(head, slot)).collect());
        Ok(heads.collect())
    }
}

impl KvPool {
    /// Checks that the eviction state matches the stored keys and the sequences.
    pub(super) fn verify_kept(&self) -> Result<(), PoolError> {
        let Some(evictor) = &self.evictor else {
            return Ok(());
        };
        for id in evictor.sequences() {
            for (layer, pages) in self.layers.iter().enumerate() {
                let Group { key, books, .. } = &self.groups[pages.group];
                let stored = stored_of_heads(books, id, key.kv_heads)?;
                if let Some(what) = evictor.contradiction(layer, id, books.len(id)?, &stored) {
                    return Err(CacheError::Corrupt { what }.into());
                }
            }
        }
        Ok(())
    }
}

/// Returns the number of keys of each KV head of a sequence.
fn stored_of_heads(
    books: &PagePool,
    id: SequenceId,
    kv_heads: usize,
) -> Result<Vec<usize>, CacheError> {
    let spans = books.spans(&[id])?;
    let of_row = kv_heads / books.table_rows();
    Ok((0..kv_heads)
        .map(|head| spans[head / of_row * 4] as usize)
        .collect())
}

/// Returns the rows, among those of all pages, at some places of each KV head of a sequence.
fn ids_of(
    books: &PagePool,
    id: SequenceId,
    kv_heads: usize,
    places: &[Vec<usize>],
) -> Result<Vec<Vec<i32>>, CacheError> {
    let rows = books.table_rows();
    let of_row = kv_heads / rows;
    let page_size = books.config().page_size();
    let slots = (0..rows).map(|row| books.slot_keys(id, row));
    let slots = slots.collect::<Result<Vec<_>, _>>()?;
    let of_heads = places.iter().enumerate().map(|(head, places)| {
        let of = |&place: &usize| {
            let slot = slots[head / of_row][place].slot;
            ((slot.page * of_row + head % of_row) * page_size + slot.slot) as i32
        };
        places.iter().map(of).collect()
    });
    Ok(of_heads.collect())
}

/// Pads numbers to `most` with another one.
fn padded(numbers: &[i32], most: usize, with: i32) -> impl Iterator<Item = i32> + '_ {
    let missing = std::iter::repeat_n(with, most - numbers.len());
    numbers.iter().copied().chain(missing)
}
