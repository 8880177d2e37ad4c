//! What is known of keys, so that those worth least are evicted.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_blocksparse::internal::dtype::accumulate_in;
use burn_sparse_transformer::{SparseMultiHeadAttention, TransformerError};

use super::KvStep;
use super::store::{Store, Stored, ints};
use crate::PoolError;
use crate::pages::{EvictionConfig, EvictionScore, SequenceId};

/// What is known of the keys of all layers and sequences.
#[derive(Clone, Debug)]
pub(super) struct Evictor {
    pub config: EvictionConfig,
    pub rollback: usize,
    sequences: BTreeMap<SequenceId, Watched>,
    /// Of each layer, if attention says which keys stay. A sequence has a seat in all of them, whose numbers are written where they are.
    layers: Vec<Option<Noted>>,
    /// How many sequences have a seat.
    seats: usize,
    /// Number of times that there were too few seats, or slots of a seat, and tensors were made anew.
    pub moves: usize,
    /// Number of evictions.
    pub evictions: usize,
}

/// What is known of a sequence.
#[derive(Clone, Debug)]
struct Watched {
    seat: usize,
    /// Last queries that can be taken back.
    loose: usize,
    /// Of each layer.
    layers: Vec<Known>,
}

/// Where the keys of a layer and sequence come from.
#[derive(Clone, Debug, Default)]
pub(super) struct Known {
    /// Positions of the keys of each KV head at the last eviction.
    pub kept: Arc<Vec<Vec<u32>>>,
    /// Tokens then.
    pub since: usize,
}

/// What attention says of a layer.
#[derive(Clone, Debug)]
pub(super) struct Noted {
    /// Of each seat and KV head, of each slot of its row `[1 + rollback]`: the attention that the key got by queries that cannot be taken back, and by each
    /// one that can; or of each seat and head its last queries, that of position `p` in slot `p` modulo how many there are. A store has values, these have none.
    pub rows: Store,
    pub heads: usize,
    pub dtype: FloatDType,
}

impl Known {
    /// The position of a slot's key.
    pub(super) fn position(&self, head: usize, slot: usize) -> usize {
        match self.kept.get(head) {
            Some(kept) if slot < kept.len() => kept[slot] as usize,
            Some(kept) => self.since + slot - kept.len(),
            None => slot,
        }
    }

    /// Forgets positions from `len` on: the last keys are always kept.
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
    /// Of a layer with so many seats, and slots of each if sums are noted.
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

    /// Slots of a seat.
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

    /// Rows of slots of a seat, of each head: `[heads, n, width]`.
    pub(super) fn read(
        &self,
        seat: usize,
        slots: &[Vec<usize>],
        device: &Device,
    ) -> Result<Tensor<3>, TransformerError> {
        let most = slots.iter().map(Vec::len).max().unwrap_or(0);
        let mut ids = Vec::with_capacity(self.heads * most);
        for (head, slots) in slots.iter().enumerate() {
            let first = (seat * self.heads + head) * self.slots();
            ids.extend(slots.iter().map(|slot| (first + slot) as i32));
            // Heads with fewer have numbers of no meaning behind them.
            ids.extend(std::iter::repeat_n(first as i32, most - slots.len()));
        }
        let ids = ints(ids, [self.heads * most], device);
        let rows = self.rows.keys_at(&ids)?;
        let [_, width] = rows.dims();
        Ok(rows.reshape([self.heads, most, width]))
    }

    /// Slots of a seat from the first on, `[1, 1, count]`.
    fn first_slots(&self, seat: usize, count: usize, device: &Device) -> Tensor<3, Int> {
        let first = seat * self.slots();
        let slots = (first..first + count).map(|slot| slot as i32);
        ints(slots.collect(), [1, 1, count], device)
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

    /// Returns whether attention that keys got is summed up.
    pub(super) fn sums(&self) -> bool {
        matches!(self.config.score, EvictionScore::Sum | EvictionScore::Mean)
    }

    /// Queries that say what keys are worth.
    pub(super) fn window(&self) -> Option<usize> {
        match self.config.score {
            EvictionScore::LastRow => Some(1),
            EvictionScore::Votes { window, .. } => Some(window),
            _ => None,
        }
    }

    /// Last queries that are remembered.
    pub(super) fn queries(&self) -> Option<usize> {
        let window = self.window()?;
        Some((window + self.rollback).next_power_of_two())
    }

    /// Slots of a sequence's seat from the first on, which are the same ones in all layers.
    pub(super) fn first_slots(
        &self,
        id: SequenceId,
        count: usize,
        device: &Device,
    ) -> Tensor<3, Int> {
        let noted = self.layers.iter().flatten().next();
        let slots = |noted: &Noted| noted.first_slots(self.seat(id)[0], count, device);
        noted.map_or_else(|| ints(Vec::new(), [1, 1, 0], device), slots)
    }

    pub(super) fn noted(&mut self, layer: usize) -> Option<&mut Noted> {
        self.layers[layer].as_mut()
    }

    pub(super) fn known(&self, layer: usize, id: SequenceId) -> Known {
        let watched = self.sequences.get(&id);
        watched.map_or_else(Known::default, |watched| watched.layers[layer].clone())
    }

    /// The seat of a sequence that joined, and how many of its last queries can be taken back.
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

    /// Room for so many seats, and slots of each.
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
            let slots: Vec<usize> = (0..noted.slots()).collect();
            let rows = noted.read(watched.seat, &vec![slots; noted.heads], device)?;
            let [_, count, _] = rows.dims();
            noted.write(rows.unsqueeze(), noted.first_slots(seat, count, device))?;
        }
        self.sequences.insert(to, Watched { seat, ..watched });
        Ok(())
    }

    /// Forgets the newest of `len + rows` queries.
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

    /// What a step that is done leaves to be taken back.
    pub(super) fn stepped(&mut self, steps: &[KvStep]) {
        for step in steps {
            if let Some(watched) = self.sequences.get_mut(&step.id) {
                watched.loose = self.rollback.min(watched.loose + step.tokens);
            }
        }
    }

    /// The fewest tokens that a sequence of `len` can go back to: what later ones did to scores is not undone.
    pub(super) fn oldest(&self, id: SequenceId, len: usize) -> usize {
        match self.config.score {
            EvictionScore::KeyNorm | EvictionScore::Custom => 0,
            _ => len - self.seat(id)[1].min(len),
        }
    }

    /// Bytes of what is known of a sequence.
    pub(super) fn bytes(&self) -> usize {
        let layers = self.layers.iter().flatten();
        let of = |noted: &Noted| {
            let [width, _] = noted.rows.widths().unwrap_or_default();
            noted.heads * noted.slots() * width * burn::tensor::DType::from(noted.dtype).size()
        };
        layers.map(of).sum()
    }

    /// What all queries gave the keys of a sequence of `len` tokens in so many slots of a layer, `[kv_heads, slots]`.
    pub(super) fn total(
        &self,
        layer: usize,
        id: SequenceId,
        [slots, len]: [usize; 2],
        device: &Device,
    ) -> Result<Option<Tensor<2>>, TransformerError> {
        let Some(noted) = self.layers[layer].as_ref().filter(|_| self.sums()) else {
            return Ok(None);
        };
        let [seat, loose] = self.seat(id);
        let all: Vec<usize> = (0..slots).collect();
        let rows = noted.read(seat, &vec![all; noted.heads], device)?;
        let place = |position: usize| 1 + position % self.rollback.max(1);
        let of_last = (len - loose.min(len)..len).map(place);
        let parts = std::iter::once(0).chain(of_last);
        let parts = parts.map(|place| rows.clone().narrow(2, place, 1));
        let total = parts.reduce(|sum, part| sum + part).unwrap_or(rows);
        Ok(Some(total.reshape([noted.heads, slots])))
    }

    /// The last queries of a sequence of `len` tokens that say what keys are worth, `[heads, m, d_k]`, oldest first.
    pub(super) fn last_queries(
        &self,
        layer: usize,
        id: SequenceId,
        len: usize,
        device: &Device,
    ) -> Result<Option<Tensor<3>>, TransformerError> {
        let Some((noted, window)) = self.layers[layer].as_ref().zip(self.window()) else {
            return Ok(None);
        };
        let places = (len - window.min(len)..len).map(|position| position % noted.slots());
        let places: Vec<usize> = places.collect();
        let queries = noted.read(self.seat(id)[0], &vec![places; noted.heads], device)?;
        Ok(Some(queries))
    }

    /// Keeps slots of each KV head, which then are the first ones.
    pub(super) fn keep(
        &mut self,
        layer: usize,
        id: SequenceId,
        places: &[Vec<usize>],
        len: usize,
        device: &Device,
    ) -> Result<(), TransformerError> {
        let Some(watched) = self.sequences.get_mut(&id) else {
            return Ok(());
        };
        let (seat, known) = (watched.seat, &mut watched.layers[layer]);
        let positions = places.iter().enumerate().map(|(head, places)| {
            let position = |&place: &usize| known.position(head, place) as u32;
            places.iter().map(position).collect()
        });
        known.kept = Arc::new(positions.collect());
        known.since = len;
        let sums = self.sums();
        if let Some(noted) = self.layers[layer].as_mut().filter(|_| sums) {
            let rows = noted.read(seat, places, device)?;
            let [_, count, _] = rows.dims();
            if count > 0 {
                noted.write(rows.unsqueeze(), noted.first_slots(seat, count, device))?;
            }
        }
        Ok(())
    }

    /// What is wrong with what is known of a sequence of `len` tokens that stores so many keys of each KV head of a layer.
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

    /// Sequences of which something is known.
    pub(super) fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.sequences.keys().copied()
    }
}
