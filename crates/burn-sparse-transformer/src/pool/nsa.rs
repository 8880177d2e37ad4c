//! Layers of native sparse attention: what a pool holds of their branches, and decoding from it.
//!
//! ```text
//! selected     all keys, in pages by the layer's pattern, which is causal
//! compressed   one pair every stride, in pages of the same table: a page of P tokens has P / stride, each by the last token of its block
//! window       the last keys of the window, in pages of a local pattern
//! tokens       the last ones of a block, from which the next pair is made, in pages of another
//! ```
//!
//! So what the books say of pages holds for all branches: copies behind a fork, steps back, what is known of a beginning.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_blocksparse::pages::{PageCopy, Residency, SequenceId, Slot, SlotKey, Writes};
use burn_blocksparse::{Fixed, NsaBranches, PageChoice, Pattern};

use super::attend::as_stored;
use super::choice::{SCORES, WALKS};
use super::replayed::{data, zeros};
use super::step::{GroupKey, GroupStep, Road, Walk};
use super::store::{Copies, Store, Stored, ints, lost};
use super::{Group, KvPool, KvPoolConfig, KvStep, KvUsage, Step};
use crate::call::Call;
use crate::error::{ensure, ensure_none};
use crate::nsa::NsaHeads;
use crate::{NsaHeadsConfig, SparseMhaInput, SparseMultiHeadAttention, TransformerError};

/// What a layer keeps beside the keys and values that are chosen.
#[derive(Debug)]
pub(super) struct Branches {
    /// Compressed pairs.
    pub entries: Store,
    /// What is compressed.
    pub tokens: Store,
    pub window: Option<Store>,
    /// Whether keys and values of the branches are others than those that are chosen.
    own: bool,
}

/// The groups of the branches that have books of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BranchGroups {
    pub tokens: usize,
    pub window: Option<usize>,
}

/// How a layer chooses pages.
pub(super) fn choice(
    nsa: &NsaHeads,
    config: &KvPoolConfig,
    page_size: usize,
) -> Result<PageChoice, TransformerError> {
    let expected = "none with nsa, whose tokens all choose their keys";
    ensure_none("choosing_prompts", config.prompts_choose, expected)?;
    let expected = "none with nsa, whose masses are those of all tokens";
    ensure_none("eviction", config.eviction.is_some(), expected)?;
    let is_window = matches!(config.residency, Residency::Window { .. });
    let got = format!("{:?}", config.residency);
    let expected = || "All or Reachable with nsa, which has a window of its own".into();
    ensure(!is_window, "residency", expected, got)?;
    Ok(nsa.op().on_pages(page_size)?)
}

/// Of a layer's group, those of the other branches, which are made if there are none.
pub(super) fn groups(
    groups: &mut Vec<Group>,
    mha: &SparseMultiHeadAttention,
    nsa: &NsaHeadsConfig,
    config: &KvPoolConfig,
) -> Result<BranchGroups, TransformerError> {
    let mut near = |keys: usize| {
        let key = GroupKey {
            pattern: Pattern::local(keys),
            heads: mha.n_heads,
            kv_heads: mha.n_kv_heads,
            alibi: None,
            relative: None,
            selection: None,
            nsa: None,
        };
        match groups.iter().position(|group| group.key == key) {
            Some(at) => Ok(at),
            None => {
                groups.push(Group::new(key, None, config)?);
                Ok::<usize, TransformerError>(groups.len() - 1)
            }
        }
    };
    Ok(BranchGroups {
        tokens: near(nsa.block)?,
        window: match nsa.window {
            0 => None,
            window => Some(near(window)?),
        },
    })
}

impl Branches {
    /// Of a layer in the group `at`, empty.
    pub(super) fn new(
        groups: &[Group],
        at: usize,
        mha: &SparseMultiHeadAttention,
        nsa: &NsaHeadsConfig,
        (stored, model): (Stored, FloatDType),
        device: &Device,
    ) -> Result<Self, TransformerError> {
        let of = groups[at].nsa.ok_or_else(lost)?;
        let store = |at: usize, of_slot: usize, stored: Stored| {
            let [pages, page_size] = groups[at].pages();
            let widths = [mha.d_k(), mha.d_model / mha.n_heads];
            let pages = [pages, page_size / of_slot];
            Store::new(pages, mha.n_kv_heads, widths, device, stored)
        };
        Ok(Self {
            entries: store(at, nsa.stride, stored)?,
            // They are few, and what is made of them is as exact as they are.
            tokens: store(of.tokens, 1, Stored::Float(model))?,
            window: match of.window {
                Some(at) => Some(store(at, 1, stored)?),
                None => None,
            },
            own: !nsa.shared_kv,
        })
    }

    /// Whether steps can be recorded: numbers of eight bits are unpacked with constants of the host.
    pub(super) fn is_recordable(&self) -> bool {
        !self.entries.is_quantized()
    }

    /// Bytes of all pages.
    pub(super) fn bytes(&self) -> usize {
        let window = self.window.as_ref().map_or(0, Store::bytes);
        self.entries.bytes() + self.tokens.bytes() + window
    }

    /// Adds what a sequence takes in a layer of the group `at`.
    pub(super) fn add_usage(
        &self,
        groups: &[Group],
        at: usize,
        id: SequenceId,
        usage: &mut KvUsage,
    ) -> Result<(), TransformerError> {
        let Group { key, books, .. } = &groups[at];
        let of = groups[at].nsa.ok_or_else(lost)?;
        let nsa = key.nsa.as_ref().ok_or_else(lost)?;
        let pairs = books.usage(id)?.slots / nsa.stride;
        usage.summary_bytes += pairs * key.kv_heads * self.entries.slot_bytes();
        let pairs = nsa.entries(books.len(id)?);
        usage.read_bytes += pairs * key.kv_heads * self.entries.slot_bytes();
        let window = of.window.zip(self.window.as_ref());
        for (at, store, is_read) in [(of.tokens, &self.tokens, false)]
            .into_iter()
            .chain(window.map(|(at, store)| (at, store, true)))
        {
            let Group { key, books, .. } = &groups[at];
            let of_books = books.usage(id)?;
            let bytes = store.slot_bytes() * key.kv_heads;
            usage.slots += of_books.slots * key.kv_heads;
            usage.bytes += of_books.bytes(bytes);
            let live = of_books.live_bytes(bytes);
            usage.live_bytes += live;
            if is_read {
                usage.read_bytes += live;
            }
            if self.own {
                usage.all_bytes += usage.tokens * bytes;
            }
        }
        Ok(())
    }
}

/// Whether a compressed block ends at a position.
fn ends(nsa: &NsaHeadsConfig, position: usize) -> bool {
    (position + 1).is_multiple_of(nsa.stride) && position + 1 >= nsa.block
}

/// Slots of the compressed pairs of keys that are stored, in pages of `page_size / stride`.
pub(super) fn entry_slots(nsa: &NsaHeadsConfig, page_size: usize, keys: &[SlotKey]) -> Vec<i32> {
    let ended = keys.iter().filter(|key| ends(nsa, key.position));
    let slot = |slot: Slot| ((slot.page * page_size + slot.slot) / nsa.stride) as i32;
    ended.map(|key| slot(key.slot)).collect()
}

/// What a step tells a layer about its compressed pairs.
#[derive(Debug)]
pub(super) struct NsaStep {
    groups: BranchGroups,
    /// Of pages of compressed pairs.
    copies: Option<Copies>,
    ended: Option<Ended>,
}

/// Blocks that end with the tokens of a step.
#[derive(Debug)]
struct Ended {
    /// None where all tokens are the step's own. Otherwise the rows of all pages that the blocks have, `[blocks · kv_heads · block]`, and the positions of
    /// their last tokens, `[blocks]`.
    of_pages: Option<[Tensor<1, Int>; 2]>,
    /// `[batch or blocks, 1, blocks of an entry]`
    slots: Tensor<3, Int>,
}

impl NsaStep {
    /// Of the group `at`; `writes` are those of all groups.
    pub(super) fn new(
        groups: &[Group],
        at: usize,
        (steps, writes): (&[KvStep], &[Vec<Writes>]),
        seq: usize,
        is_dense: bool,
        device: &Device,
    ) -> Result<Option<Self>, TransformerError> {
        let Group {
            key, books, nsa, ..
        } = &groups[at];
        let (Some(of), Some(nsa)) = (nsa, &key.nsa) else {
            return Ok(None);
        };
        let page_size = books.config().page_size() / nsa.stride;
        let whole = |copy: &PageCopy| PageCopy {
            slots: 0..page_size,
            ..copy.clone()
        };
        let copies = writes[at].iter().flat_map(|writes| &writes.copies);
        let copies: Vec<PageCopy> = copies.map(whole).collect();
        let copies = Copies::new(copies.iter(), [1, key.kv_heads, page_size], device);
        let ended = match is_dense {
            true => Ended::of_prompts(nsa, &writes[at], seq, device),
            false => {
                let tokens = (&groups[of.tokens], steps);
                Ended::of_pages(nsa, tokens, &writes[at], device)?
            }
        };
        Ok(Some(Self {
            groups: *of,
            copies,
            ended,
        }))
    }
}

impl Ended {
    /// Of prompts, which begin with the first token.
    fn of_prompts(
        nsa: &NsaHeadsConfig,
        writes: &[Writes],
        seq: usize,
        device: &Device,
    ) -> Option<Self> {
        let count = nsa.entries(seq);
        let slots = writes.iter().flat_map(|writes| {
            (0..count).map(|entry| {
                let last = entry * nsa.stride + nsa.block - 1;
                // Of places behind a prompt none.
                let slot = (last < writes.tokens).then(|| writes.slots[last]);
                slot.map_or(-1, |slot| slot.div_euclid(nsa.stride as i32))
            })
        });
        (count > 0).then(|| Self {
            of_pages: None,
            slots: ints(slots.collect(), [writes.len(), 1, count], device),
        })
    }

    /// Of sequences that go on: their tokens are in pages.
    fn of_pages(
        nsa: &NsaHeadsConfig,
        (tokens, steps): (&Group, &[KvStep]),
        writes: &[Writes],
        device: &Device,
    ) -> Result<Option<Self>, TransformerError> {
        let mut rows = Rows::default();
        for (step, writes) in steps.iter().zip(writes) {
            rows.add(nsa, (tokens, step.id), writes)?;
        }
        let (all, count) = (rows.ids.len(), rows.last.len());
        Ok((count > 0).then(|| Self {
            of_pages: Some([
                ints(rows.ids, [all], device),
                ints(rows.last, [count], device),
            ]),
            slots: ints(rows.slots, [count, 1, 1], device),
        }))
    }
}

/// Blocks that end: rows of their tokens, head after head, positions of the last ones, and slots of their pairs.
#[derive(Default)]
struct Rows {
    ids: Vec<i32>,
    last: Vec<i32>,
    slots: Vec<i32>,
}

impl Rows {
    /// Those of a sequence, whose tokens are in pages of the group; whether there are some.
    fn add(
        &mut self,
        nsa: &NsaHeadsConfig,
        (tokens, id): (&Group, SequenceId),
        writes: &Writes,
    ) -> Result<bool, TransformerError> {
        let new = (0..writes.tokens).map(|token| (token, writes.first + token));
        let ended: Vec<_> = new.filter(|(_, at)| ends(nsa, *at)).collect();
        if ended.is_empty() {
            return Ok(false);
        }
        let ([_, page_size], heads) = (tokens.pages(), tokens.key.kv_heads);
        let keys = tokens.books.slot_keys(id, 0)?;
        let stored: BTreeMap<usize, Slot> =
            keys.iter().map(|key| (key.position, key.slot)).collect();
        for (token, at) in ended {
            for head in 0..heads {
                for position in at + 1 - nsa.block..=at {
                    let slot = stored.get(&position).ok_or_else(lost)?;
                    let row = (slot.page * heads + head) * page_size + slot.slot;
                    self.ids.push(row as i32);
                }
            }
            self.last.push(at as i32);
            let stride = nsa.stride as i32;
            self.slots.push(writes.slots[token].div_euclid(stride));
        }
        Ok(true)
    }
}

/// What recorded steps of one token a sequence read of blocks that end: as many rows whether one does or not.
pub(super) struct NsaInputs {
    groups: BranchGroups,
    /// `[batch · kv_heads · block]`
    ids: Fixed<1, Int>,
    /// `[batch]`
    last: Fixed<1, Int>,
    /// `[batch, 1, 1]`
    slots: Fixed<3, Int>,
}

impl NsaInputs {
    pub(super) fn new(
        group: &Group,
        batch: usize,
        device: &Device,
    ) -> Result<Option<Self>, TransformerError> {
        let (Some(groups), Some(nsa)) = (group.nsa, &group.key.nsa) else {
            return Ok(None);
        };
        Ok(Some(Self {
            groups,
            ids: zeros([batch * group.key.kv_heads * nsa.block], device)?,
            last: zeros([batch], device)?,
            slots: zeros([batch, 1, 1], device)?,
        }))
    }

    /// Writes which blocks end, of a group of all groups.
    pub(super) fn write(
        &self,
        groups: &[Group],
        group: &Group,
        (batch, writes): (&[SequenceId], &[Writes]),
    ) -> Result<(), TransformerError> {
        let nsa = group.key.nsa.as_ref().ok_or_else(lost)?;
        let mut rows = Rows::default();
        for (&id, writes) in batch.iter().zip(writes) {
            if !rows.add(nsa, (&groups[self.groups.tokens], id), writes)? {
                // Some rows, of which nothing is stored.
                rows.ids.extend(vec![0; group.key.kv_heads * nsa.block]);
                rows.last.push(0);
                rows.slots.push(-1);
            }
        }
        self.ids.write(data(rows.ids, self.ids.dims()))?;
        self.last.write(data(rows.last, self.last.dims()))?;
        self.slots.write(data(rows.slots, self.slots.dims()))?;
        Ok(())
    }

    pub(super) fn step(&self) -> NsaStep {
        NsaStep {
            groups: self.groups,
            copies: None,
            ended: Some(Ended {
                of_pages: Some([self.ids.tensor(), self.last.tensor()]),
                slots: self.slots.tensor(),
            }),
        }
    }
}

impl SparseMultiHeadAttention {
    /// What heads of native sparse attention see in a step of a pool, `[batch, heads, seq, d_v]`.
    pub(super) fn nsa_pool_context(
        &self,
        input: SparseMhaInput,
        nsa: &NsaHeads,
        pool: &mut KvPool,
        step: &Step,
        layer: usize,
    ) -> Result<Tensor<4>, TransformerError> {
        let call = Call::at(&input, step.rows.positions.clone())?;
        let x = input.query;
        let (heads, placing) = self.nsa_projections(x.clone(), &call)?;
        let query = heads.query.clone();
        let gates = nsa.gates(x.clone(), &query, self.precision)?;
        let new = nsa.branches(x, heads, &call.key, &placing, self.precision)?;

        let (at, store) = &mut pool.layers[layer];
        let group = &step.groups[*at];
        let branches = pool.branches[layer].as_mut().ok_or_else(lost)?;
        let of_step = group.nsa.as_ref().ok_or_else(lost)?;
        let of_group = |at: usize| &step.groups[at];
        write(store, group, new.selected.clone(), self.n_kv_heads)?;
        let tokens = of_group(of_step.groups.tokens);
        write(
            &mut branches.tokens,
            tokens,
            new.tokens.clone(),
            self.n_kv_heads,
        )?;
        let window = of_step.groups.window.map(of_group);
        if let (Some(store), Some(group)) = (&mut branches.window, window) {
            write(store, group, new.window.clone(), self.n_kv_heads)?;
        }
        branches.entries.copy(of_step.copies.as_ref())?;

        if let Road::Dense(_) = group.road {
            let compressed = nsa.compressed(new.tokens.clone(), 0, &placing, self.precision)?;
            if let (Some(pair), Some(ended)) = (compressed.clone(), &of_step.ended) {
                branches.entries.write(None, pair, ended.slots.clone())?;
            }
            return nsa.attend(query, new, compressed, gates);
        }
        if let Some(Ended {
            of_pages: Some([ids, last]),
            slots,
        }) = &of_step.ended
        {
            let rows = branches.tokens.gather(ids, query.dtype().into())?;
            let [count] = last.dims();
            let blocks = rows.map(|rows| {
                let [_, width] = rows.dims();
                rows.reshape([count, self.n_kv_heads, nsa.config().block, width])
            });
            let last_of = |_: [usize; 2]| last.clone();
            let pair = nsa.compressed_at(blocks, last_of, &placing, self.precision)?;
            let pair = pair.ok_or_else(lost)?;
            branches.entries.write(None, pair, slots.clone())?;
        }
        let Road::Paged(walk) = &group.road else {
            return Err(lost());
        };
        let [compressed, selected] =
            self.attend_compressed_and_chosen(nsa, &query, [&*store, &branches.entries], walk)?;
        let dtype = FloatDType::from(query.dtype());
        let window = match (&branches.window, window.map(|group| &group.road)) {
            (Some(store), Some(Road::Paged(walk))) => {
                let seen = self.attend_pages(query, store.pages()?, walk)?;
                Some(seen.out.cast(dtype))
            }
            (None, None) => None,
            _ => return Err(lost()),
        };
        let seen = NsaBranches::new(Some(compressed), selected.cast(dtype), window);
        Ok(seen.gated(gates)?)
    }

    /// The first two branches of queries `[batch, heads, s, d_k]`, each of which is a walk of its own.
    fn attend_compressed_and_chosen(
        &self,
        nsa: &NsaHeads,
        query: &Tensor<4>,
        [store, entries]: [&Store; 2],
        walk: &Walk,
    ) -> Result<[Tensor<4>; 2], TransformerError> {
        let (pages, options) = (store.pages()?, self.paged_options(query));
        let choice = walk.choice.as_ref().ok_or_else(lost)?;
        let [batch, heads, seq, width] = query.dims();
        let [_, _, places] = walk.table.dims();
        let of_rows = |x: &Tensor<3, Int>, first: usize, count: usize| {
            let [_, _, numbers] = x.dims();
            let x = x.clone().reshape([batch, seq, numbers]);
            x.narrow(1, first, count)
                .reshape([batch * count, 1, numbers])
        };
        let table = of_rows(&walk.table, 0, 1).reshape([batch, places]);
        let sums = match query.dtype() {
            DType::F64 => FloatDType::F64,
            _ => FloatDType::F32,
        };
        let compressed = entries.of_tables(table, sums)?;
        let [_, _, strides, _] = compressed[0].dims();
        // More than one row at a time, whatever a context is.
        let numbers = (batch * heads * strides).max(1);
        let together = (SCORES / numbers).min(WALKS / batch).clamp(1, seq);
        let (mut by_pairs, mut by_pages) = (Vec::new(), Vec::new());
        for first in (0..seq).step_by(together) {
            let count = together.min(seq - first);
            let (table, spans) = (
                of_rows(&walk.table, first, count),
                of_rows(&walk.spans, first, count),
            );
            let rows = query.clone().narrow(2, first, count);
            // A row's walk ends with its own key.
            let positions = spans.clone().narrow(2, 0, 1).sub_scalar(1);
            let positions = positions.reshape([batch, count]);
            let seen = (nsa.op()).of_strides(rows.clone(), compressed.clone(), &positions)?;
            by_pairs.push(seen.out);
            // Where there is no more than what is chosen, there is no choice.
            let selected = match places > choice.listed() {
                true => Some(nsa.op().choose_pages(seen.masses, &positions, choice)?),
                false => None,
            };
            let rows = as_stored(rows, &pages).swap_dims(1, 2);
            let rows = rows.reshape([batch * count, heads, width]);
            let part = (rows, table, spans);
            let out = self.attend_walks(part, selected, &pages, walk, &options)?;
            let [.., width] = out.dims();
            let out = out.reshape([batch, count, heads, width]);
            by_pages.push(out.swap_dims(1, 2));
        }
        let joined = |mut parts: Vec<Tensor<4>>| match parts.len() {
            1 => parts.remove(0),
            _ => Tensor::cat(parts, 2),
        };
        Ok([joined(by_pairs), joined(by_pages)])
    }
}

/// Writes a step's keys and values of a branch.
fn write(
    store: &mut Store,
    step: &GroupStep,
    pair: [Tensor<4>; 2],
    kv_heads: usize,
) -> Result<(), TransformerError> {
    if cfg!(debug_assertions) {
        store.poison(&step.freed, kv_heads);
    }
    store.write(step.copies.as_ref(), pair, step.slots.clone())
}
