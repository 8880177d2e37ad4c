//! State of eviction by scores.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_sparse_transformer::{SparseMultiHeadAttention, TransformerError};

use super::KvStep;
use super::store::{Store, Stored, ints};
use crate::PoolError;
use crate::pages::{EvictionConfig, EvictionScore, SequenceId};

/// Eviction state of all layers and sequences.
#[derive(Clone, Debug)]
pub(super) struct Evictor {
    pub config: EvictionConfig,
    pub rollback: usize,
    sequences: BTreeMap<SequenceId, Watched>,
    /// Per layer, if scores come from attention. A sequence has the same seat in all of them; its numbers are written in place.
    layers: Vec<Option<Noted>>,
    /// Number of seats.
    seats: usize,
    /// Number of times that seats or slots ran out and the tensors were reallocated.
    pub moves: usize,
    /// Number of evictions.
    pub evictions: usize,
}

/// Eviction state of a sequence.
#[derive(Clone, Debug)]
struct Watched {
    seat: usize,
    /// Number of last queries that can be rolled back.
    loose: usize,
    /// One per layer.
    layers: Vec<Known>,
}

/// Origin of the keys of a layer and sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// Positions of the keys of each KV head at the last eviction.
    pub kept: Arc<Vec<Vec<u32>>>,
    /// Number of tokens then.
    pub since: usize,
}

/// Statistics of a layer's attention.
#[derive(Clone, Debug)]
pub(super) struct Noted {
    /// Either, per seat and KV head, a row `[1 + rollback]` per key slot: the sum of attention from queries that can no longer be rolled back, then
    /// the attention from each one that can. Or, per seat and head, the last queries: that of position `p` in slot `p` modulo their number. These
    /// fill the keys of the store, and its values are unused.
    pub rows: Store,
    pub heads: usize,
    pub dtype: FloatDType,
}

impl Known {
    pub(super) fn position(&self, head: usize, slot: usize) -> usize {
        match self.kept.get(head) {
            Some(kept) if slot < kept.len() => kept[slot] as usize,
            Some(kept) => self.since + slot - kept.len(),
            None => slot,
        }
    }

    /// Forgets positions from `len` on: the last keys are always retained.
    fn truncate(&mut self, len: usize) {
        if len < self.since {
            let gone = self.since - len;
            for kept in Arc::make_mut(&mut self.kept) {
                kept.truncate(kept.len().saturating_sub(gone));
            }
            self.since = len;
        }
    }
}

impl Noted {
    /// Allocates a layer's statistics for `seats` seats, with `slots` slots each if attention is summed.
    fn new(
        mha: &SparseMultiHeadAttention,
        evictor: &Evictor,
        [seats, slots]: [usize; 2],
        device: &Device,
    ) -> Result<Option<Self>, TransformerError> {
        let model = mha.product_dtype();
        let (heads, slots, width, dtype) = match evictor.queries() {
            Some(queries) => (mha.n_heads(), queries, mha.head_widths()[0], model),
            None if evictor.sums() => {
                let width = 1 + evictor.rollback;
                (mha.n_kv_heads(), slots, width, accumulate_in(model))
            }
            None => return Ok(None),
        };
        let stored = Stored::Float(dtype);
        let rows = Store::new([seats * heads, slots], heads, [width, 1], device, stored)?;
        Ok(Some(Self { rows, heads, dtype }))
    }

    /// Returns the slots of a seat.
    pub(super) fn slots(&self) -> usize {
        self.rows.page_size()
    }

    /// Writes rows `[batch, heads, n, width]` to slots `[batch, 1, n]` of seats.
    pub(super) fn write(
        &mut self,
        rows: Tensor<4>,
        slots: Tensor<3, Int>,
    ) -> Result<(), TransformerError> {
        let [batch, heads, count, _] = rows.dims();
        let none = Tensor::zeros(
            [batch, heads, count, 1],
            (&rows.device(), self.dtype.into()),
        );
        self.rows.write(None, [rows.cast(self.dtype), none], slots)
    }

    /// Reads rows of slots of seats, for each head: `[seats, heads, n, width]`. Heads with fewer slots are padded with arbitrary rows.
    fn read<'a>(
        &self,
        seats: impl ExactSizeIterator<Item = (usize, &'a [Vec<usize>])> + Clone,
        device: &Device,
    ) -> Result<Tensor<4>, TransformerError> {
        let most = (seats.clone().flat_map(|(_, slots)| slots))
            .map(Vec::len)
            .max()
            .unwrap_or(0);
        let count = seats.len();
        let mut ids = Vec::with_capacity(count * self.heads * most);
        for (seat, slots) in seats {
            for (head, slots) in slots.iter().enumerate() {
                let first = (seat * self.heads + head) * self.slots();
                ids.extend(slots.iter().map(|slot| (first + slot) as i32));
                ids.extend(std::iter::repeat_n(first as i32, most - slots.len()));
            }
        }
        let ids = ints(ids, [count * self.heads * most], device);
        let rows = self.rows.keys_at(&ids)?;
        let [_, width] = rows.dims();
        Ok(rows.reshape([count, self.heads, most, width]))
    }

    /// Returns the first `count` slots of seats, `[seats, 1, count]`.
    fn first_slots(
        &self,
        seats: impl ExactSizeIterator<Item = usize>,
        count: usize,
        device: &Device,
    ) -> Tensor<3, Int> {
        let shape = [seats.len(), 1, count];
        let slots = seats.flat_map(|seat| (0..count).map(move |slot| (seat, slot)));
        let slots = slots.map(|(seat, slot)| (seat * self.slots() + slot) as i32);
        ints(slots.collect(), shape, device)
    }
}

impl Evictor {
    pub(super) fn new(
        config: EvictionConfig,
        rollback: usize,
        layers: &[&SparseMultiHeadAttention],
        seats: [usize; 2],
        device: &Device,
    ) -> Result<Self, PoolError> {
        config.validate()?;
        blocksparse::ensure! {
            PoolError;
            config.recent >= rollback => "recent", format!("at least {rollback}, what can be taken back"), config.recent;
        }
        let mut evictor = Self {
            config,
            rollback,
            sequences: BTreeMap::new(),
            layers: Vec::new(),
            seats: seats[0],
            moves: 0,
            evictions: 0,
        };
        let seats = [seats[0], seats[1].next_power_of_two()];
        let noted = layers
            .iter()
            .map(|mha| Noted::new(mha, &evictor, seats, device));
        evictor.layers = noted.collect::<Result<_, _>>()?;
        Ok(evictor)
    }

    /// Returns whether attention is summed per key.
    pub(super) fn sums(&self) -> bool {
        matches!(self.config.score, EvictionScore::Sum | EvictionScore::Mean)
    }

    /// Returns the number of last queries that score keys.
    pub(super) fn window(&self) -> Option<usize> {
        match self.config.score {
            EvictionScore::LastRow => Some(1),
            EvictionScore::Votes { window, .. } => Some(window),
            _ => None,
        }
    }

    /// Returns the number of last queries that are stored.
    pub(super) fn queries(&self) -> Option<usize> {
        let window = self.window()?;
        Some((window + self.rollback).next_power_of_two())
    }

    /// Returns the first `count` slots of a sequence's seat, which are equal in all layers.
    pub(super) fn first_slots(
        &self,
        id: SequenceId,
        count: usize,
        device: &Device,
    ) -> Tensor<3, Int> {
        let noted = self.layers.iter().flatten().next();
        let slots =
            |noted: &Noted| noted.first_slots([self.seat(id)[0]].into_iter(), count, device);
        noted.map_or_else(|| ints(Vec::new(), [1, 1, 0], device), slots)
    }

    pub(super) fn noted(&mut self, layer: usize) -> Option<&mut Noted> {
        self.layers[layer].as_mut()
    }

    pub(super) fn known(&self, layer: usize, id: SequenceId) -> Known {
        let watched = self.sequences.get(&id);
        watched.map_or_else(Known::default, |watched| watched.layers[layer].clone())
    }

    /// Returns the seat of a sequence, and how many of its last queries can be rolled back.
    pub(super) fn seat(&self, id: SequenceId) -> [usize; 2] {
        let watched = self.sequences.get(&id);
        watched.map_or([0; 2], |watched| [watched.seat, watched.loose])
    }

    pub(super) fn join(&mut self, id: SequenceId) -> Result<(), TransformerError> {
        let is_taken = |seat: &usize| self.sequences.values().any(|other| other.seat == *seat);
        let seat = (0..).find(|seat| !is_taken(seat)).unwrap_or(0);
        let watched = Watched {
            seat,
            loose: 0,
            layers: vec![Known::default(); self.layers.len()],
        };
        self.sequences.insert(id, watched);
        self.make_room([seat + 1, 0])
    }

    /// Makes space for this many seats and slots of each.
    pub(super) fn make_room(&mut self, [seats, slots]: [usize; 2]) -> Result<(), TransformerError> {
        let sums = self.sums();
        let mut has_moved = false;
        for noted in self.layers.iter_mut().flatten() {
            let slots = match sums {
                true => slots.next_power_of_two().max(noted.slots()),
                false => noted.slots(),
            };
            if seats > self.seats || slots > noted.slots() {
                let pages = self.seats.max(seats.next_power_of_two()) * noted.heads;
                noted.rows.grow([pages, slots])?;
                has_moved = true;
            }
        }
        self.moves += usize::from(has_moved);
        if seats > self.seats {
            self.seats = seats.next_power_of_two();
        }
        Ok(())
    }

    pub(super) fn leave(&mut self, id: SequenceId) {
        self.sequences.remove(&id);
    }

    pub(super) fn fork(
        &mut self,
        from: SequenceId,
        to: SequenceId,
        device: &Device,
    ) -> Result<(), TransformerError> {
        self.join(to)?;
        let Some(watched) = self.sequences.get(&from).cloned() else {
            return Ok(());
        };
        let [seat, _] = self.seat(to);
        for noted in self.layers.iter_mut().flatten() {
            let slots = vec![(0..noted.slots()).collect(); noted.heads];
            let rows = noted.read([(watched.seat, slots.as_slice())].into_iter(), device)?;
            let slots = noted.first_slots([seat].into_iter(), noted.slots(), device);
            noted.write(rows, slots)?;
        }
        self.sequences.insert(to, Watched { seat, ..watched });
        Ok(())
    }

    /// Forgets the last `rows` queries of a sequence, which keeps `len` tokens.
    pub(super) fn truncate(&mut self, id: SequenceId, len: usize, rows: usize) {
        if let Some(watched) = self.sequences.get_mut(&id) {
            watched.loose = watched.loose.saturating_sub(rows);
            for known in &mut watched.layers {
                match len {
                    0 => *known = Known::default(),
                    _ => known.truncate(len),
                }
            }
        }
    }

    /// Updates the number of queries that can be rolled back after a step.
    pub(super) fn stepped(&mut self, steps: &[KvStep]) {
        for step in steps {
            if let Some(watched) = self.sequences.get_mut(&step.id) {
                watched.loose = self.rollback.min(watched.loose + step.tokens);
            }
        }
    }

    /// Returns the fewest tokens that a sequence of `len` can be rolled back to: the effect of later ones on scores cannot be undone.
    pub(super) fn oldest(&self, id: SequenceId, len: usize) -> usize {
        match self.config.score {
            EvictionScore::KeyNorm | EvictionScore::Custom => 0,
            _ => len - self.seat(id)[1].min(len),
        }
    }

    /// Returns the bytes of the state of a sequence.
    pub(super) fn bytes(&self) -> usize {
        let layers = self.layers.iter().flatten();
        let of = |noted: &Noted| {
            let [width, _] = noted.rows.widths().unwrap_or_default();
            noted.heads * noted.slots() * width * burn::tensor::DType::from(noted.dtype).size()
        };
        layers.map(of).sum()
    }

    /// Returns the attention that keys got from all queries, in the first `slots` slots of a layer, for sequences with their lengths:
    /// `[sequences · kv_heads, slots]`.
    pub(super) fn total(
        &self,
        layer: usize,
        sequences: &[(SequenceId, usize)],
        slots: usize,
        device: &Device,
    ) -> Result<Option<Tensor<2>>, TransformerError> {
        let Some(noted) = self.layers[layer].as_ref().filter(|_| self.sums()) else {
            return Ok(None);
        };
        let all = vec![(0..slots).collect(); noted.heads];
        let seats = (sequences.iter()).map(|&(id, _)| (self.seat(id)[0], all.as_slice()));
        let rows = noted.read(seats, device)?;
        let flat = [sequences.len() * noted.heads, slots];
        if self.rollback == 0 {
            return Ok(Some(rows.reshape(flat)));
        }
        // The queries that can be rolled back have columns of their own, some of which are unused.
        let width = 1 + self.rollback;
        let unused = sequences.iter().flat_map(|&(id, len)| {
            let loose = self.seat(id)[1].min(len);
            let mut unused = vec![1; width];
            unused[0] = 0;
            (len - loose..len).for_each(|position| unused[1 + position % self.rollback] = 0);
            unused
        });
        let unused = ints(unused.collect(), [sequences.len(), 1, 1, width], device);
        let unused = unused.equal_elem(1).expand(rows.dims());
        let total = rows.mask_fill(unused, 0.0).sum_dim(3);
        Ok(Some(total.reshape(flat)))
    }

    /// Returns the last queries of sequences with these lengths that score keys, `[sequences, heads, m, d_k]`, oldest first. Every sequence has `m`,
    /// because a cache that evicts has more keys than scoring queries.
    pub(super) fn last_queries(
        &self,
        layer: usize,
        sequences: &[(SequenceId, usize)],
        device: &Device,
    ) -> Result<Option<Tensor<4>>, TransformerError> {
        let Some((noted, window)) = self.layers[layer].as_ref().zip(self.window()) else {
            return Ok(None);
        };
        let shortest = sequences.iter().map(|&(_, len)| len).min().unwrap_or(0);
        let places = sequences.iter().map(|&(id, len)| {
            let places = (len - window.min(shortest)..len).map(|position| position % noted.slots());
            (self.seat(id)[0], vec![places.collect(); noted.heads])
        });
        let places: Vec<(usize, Vec<Vec<usize>>)> = places.collect();
        let seats = (places.iter()).map(|(seat, places)| (*seat, places.as_slice()));
        Ok(Some(noted.read(seats, device)?))
    }

    /// Keeps the statistics of some slots of each KV head of sequences, and moves them to the first slots.
    pub(super) fn keep(
        &mut self,
        layer: usize,
        kept: &[(SequenceId, &[Vec<usize>], usize)],
        device: &Device,
    ) -> Result<(), TransformerError> {
        let mut seats = Vec::with_capacity(kept.len());
        for &(id, places, len) in kept {
            let Some(watched) = self.sequences.get_mut(&id) else {
                continue;
            };
            seats.push((watched.seat, places));
            let known = &mut watched.layers[layer];
            let positions = places.iter().enumerate().map(|(head, places)| {
                let position = |&place: &usize| known.position(head, place) as u32;
                places.iter().map(position).collect()
            });
            known.kept = Arc::new(positions.collect());
            known.since = len;
        }
        let sums = self.sums();
        if let Some(noted) = self.layers[layer].as_mut().filter(|_| sums) {
            let rows = noted.read(seats.iter().copied(), device)?;
            let [_, _, count, _] = rows.dims();
            if count > 0 && !seats.is_empty() {
                let seats = seats.iter().map(|&(seat, _)| seat);
                noted.write(rows, noted.first_slots(seats, count, device))?;
            }
        }
        Ok(())
    }

    /// Describes a contradiction in the state of a sequence of `len` tokens, given the number of stored keys per KV head of a layer.
    pub(super) fn contradiction(
        &self,
        layer: usize,
        id: SequenceId,
        len: usize,
        stored: &[usize],
    ) -> Option<String> {
        let Known { kept, since } = self.known(layer, id);
        let mut heads = kept.iter().zip(stored).enumerate();
        heads.find_map(|(head, (kept, &stored))| {
            let is_whole = since <= len
                && kept.len() + len - since == stored
                && kept.is_sorted_by(|a, b| a < b)
                && kept.last().is_none_or(|&last| (last as usize) < since);
            let before = kept.len();
            (!is_whole).then(|| {
                format!("{id} has {stored} keys of head {head}, {before} of them from before token {since} of {len}")
            })
        })
    }

    /// Returns the sequences that have state.
    pub(super) fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.sequences.keys().copied()
    }
}
