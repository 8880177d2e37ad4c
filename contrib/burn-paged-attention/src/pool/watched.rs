//! What is known of keys, for those to be let go that are worth least.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::store::ints;
use crate::PoolError;
use crate::pages::{EvictionConfig, EvictionScore, SequenceId};

/// What is known of the keys of all layers and sequences.
#[derive(Clone, Debug)]
pub(super) struct Evictor {
    pub config: EvictionConfig,
    pub rollback: usize,
    /// Of each layer, of each sequence.
    pub layers: Vec<BTreeMap<SequenceId, Watched>>,
}

/// What is known of the keys of a layer and sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct Watched {
    /// `[kv_heads, slots]`: the attention that each key got, by queries that cannot be taken back.
    pub sums: Option<Tensor<2>>,
    /// `[kv_heads, rows, slots]`: that of the queries that can.
    pub recent: Option<Tensor<3>>,
    /// `[heads, rows, d_k]`: the last queries.
    pub queries: Option<Tensor<3>>,
    /// Last queries that can be taken back.
    pub loose: usize,
    /// `[kv_heads, slots]`, f32: what the contest that is due goes by.
    pub scores: Option<Tensor<2>>,
    /// Positions of the keys of each KV head at the last eviction.
    pub kept: Arc<Vec<Vec<u32>>>,
    /// Tokens then.
    pub since: usize,
}

impl Watched {
    /// The position of a slot's key.
    pub(super) fn position(&self, head: usize, slot: usize) -> usize {
        match self.kept.get(head) {
            Some(kept) if slot < kept.len() => kept[slot] as usize,
            Some(kept) => self.since + slot - kept.len(),
            None => slot,
        }
    }

    /// Forgets the newest of `len + rows` queries.
    fn truncate(&mut self, len: usize, rows: usize) {
        if len == 0 {
            *self = Self::default();
            return;
        }
        self.loose = self.loose.saturating_sub(rows);
        self.queries = self.queries.take().and_then(|queries| {
            let [_, all, _] = queries.dims();
            (all > rows).then(|| queries.narrow(1, 0, all - rows))
        });
        self.recent = self.recent.take().and_then(|recent| {
            let [_, all, _] = recent.dims();
            (all > rows).then(|| recent.narrow(1, 0, all - rows))
        });
        if len < self.since {
            // The last keys are always kept.
            let gone = self.since - len;
            let kept = Arc::make_mut(&mut self.kept);
            for kept in kept {
                kept.truncate(kept.len().saturating_sub(gone));
            }
            self.since = len;
        }
    }

    /// Keeps slots of each KV head, which then are the first ones.
    pub(super) fn keep(&mut self, places: &[Vec<usize>], len: usize, device: &Device) {
        let positions = places.iter().enumerate().map(|(head, places)| {
            let position = |&place: &usize| self.position(head, place) as u32;
            places.iter().map(position).collect()
        });
        self.kept = Arc::new(positions.collect());
        self.since = len;
        self.scores = None;
        let heads = places.len();
        let most = places.iter().map(Vec::len).max().unwrap_or(0);
        // Heads that keep fewer take zeros, from behind all slots.
        let chosen = |slots: usize| {
            let places = places.iter().flat_map(|places| {
                let none = std::iter::repeat_n(slots, most - places.len());
                places.iter().copied().chain(none)
            });
            places.map(|place| place as i32).collect::<Vec<_>>()
        };
        self.sums = self.sums.take().map(|sums| {
            let slots =
                sums.dims()[1].max(places.iter().flatten().max().map_or(0, |&last| last + 1));
            let places = ints(chosen(slots), [heads, most], device);
            fit(sums, slots + 1).gather(1, places)
        });
        self.recent = self.recent.take().map(|recent| {
            let [_, rows, slots] = recent.dims();
            let places = ints(chosen(slots), [heads, 1, most], device);
            fit(recent, slots + 1).gather(2, places.expand([heads, rows, most]))
        });
    }

    /// Bytes of the tensors.
    fn bytes(&self) -> usize {
        fn of<const D: usize>(tensor: &Option<Tensor<D>>) -> usize {
            let bytes = |tensor: &Tensor<D>| tensor.shape().num_elements() * tensor.dtype().size();
            tensor.as_ref().map_or(0, bytes)
        }
        of(&self.sums) + of(&self.recent) + of(&self.queries)
    }
}

impl Evictor {
    pub(super) fn new(
        config: EvictionConfig,
        rollback: usize,
        layers: usize,
    ) -> Result<Self, PoolError> {
        config.validate()?;
        blocksparse::ensure! {
            PoolError;
            config.recent >= rollback => "recent", format!("at least {rollback}, what can be taken back"), config.recent;
        }
        Ok(Self {
            config,
            rollback,
            layers: vec![BTreeMap::new(); layers],
        })
    }

    pub(super) fn watched(&mut self, layer: usize, id: SequenceId) -> &mut Watched {
        self.layers[layer].entry(id).or_default()
    }

    pub(super) fn leave(&mut self, id: SequenceId) {
        for layer in &mut self.layers {
            layer.remove(&id);
        }
    }

    pub(super) fn fork(&mut self, from: SequenceId, to: SequenceId) {
        for layer in &mut self.layers {
            if let Some(watched) = layer.get(&from).cloned() {
                layer.insert(to, watched);
            }
        }
    }

    pub(super) fn truncate(&mut self, id: SequenceId, len: usize, rows: usize) {
        for layer in &mut self.layers {
            if let Some(watched) = layer.get_mut(&id) {
                watched.truncate(len, rows);
            }
        }
    }

    /// The fewest tokens that a sequence of `len` can go back to: what later ones did to scores is not undone.
    pub(super) fn oldest(&self, id: SequenceId, len: usize) -> usize {
        match self.config.score {
            EvictionScore::KeyNorm | EvictionScore::Custom => 0,
            _ => {
                let watched = self.layers.iter().filter_map(|layer| layer.get(&id));
                let loose = watched.map(|watched| watched.loose).min();
                len - loose.unwrap_or(len).min(len)
            }
        }
    }

    /// Bytes of what is known of a sequence.
    pub(super) fn bytes(&self, id: SequenceId) -> usize {
        let watched = self.layers.iter().filter_map(|layer| layer.get(&id));
        watched.map(Watched::bytes).sum()
    }
}

/// So many slots: zeros for those that came since, and none that are no more.
pub(super) fn fit<const D: usize>(x: Tensor<D>, slots: usize) -> Tensor<D> {
    let mut shape = x.dims();
    let width = shape[D - 1];
    if width == slots {
        return x;
    }
    if width > slots {
        return x.narrow(D - 1, 0, slots);
    }
    shape[D - 1] = slots - width;
    let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
    Tensor::cat(vec![x, zeros], D - 1)
}
