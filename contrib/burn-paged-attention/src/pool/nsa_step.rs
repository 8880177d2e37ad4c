//! Inputs of a step for native sparse attention: the compressed blocks that end with its tokens.

use std::collections::BTreeMap;

use burn::tensor::{Device, Int, Tensor};
use burn_blocksparse::graph::StaticInput;
use burn_sparse_transformer::nsa::NsaHeadsConfig;

use super::store::{Copies, ints, lost, overwrite, zeros};
use super::{Group, KvStep};
use crate::PoolError;
use crate::pages::{PageCopy, SequenceId, Slot, SlotKey, Writes};

/// Groups of the branches with block tables of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BranchGroups {
    pub tokens: usize,
    pub window: Option<usize>,
}

/// Returns whether a compressed block ends at a position.
fn ends(nsa: &NsaHeadsConfig, position: usize) -> bool {
    (position + 1).is_multiple_of(nsa.stride) && position + 1 >= nsa.block
}

/// Returns the slots of the stored compressed pairs, in pages of `page_size / stride`.
pub(super) fn entry_slots(nsa: &NsaHeadsConfig, page_size: usize, keys: &[SlotKey]) -> Vec<i32> {
    let ended = keys.iter().filter(|key| ends(nsa, key.position));
    let slot = |slot: Slot| ((slot.page * page_size + slot.slot) / nsa.stride) as i32;
    ended.map(|key| slot(key.slot)).collect()
}

/// Inputs of a layer for its compressed pairs.
#[derive(Debug)]
pub(super) struct NsaStep {
    pub groups: BranchGroups,
    /// Copies of pages of compressed pairs.
    pub copies: Option<Copies>,
    pub ended: Option<Ended>,
}

/// Blocks that end with the tokens of a step.
#[derive(Debug)]
pub(super) struct Ended {
    /// None if all tokens are the step's own. Otherwise the rows of the blocks among those of all pages, `[blocks · kv_heads · block]`, and the
    /// positions of their last tokens, `[blocks]`.
    pub of_pages: Option<[Tensor<1, Int>; 2]>,
    /// `[batch or blocks, 1, blocks of an entry]`
    pub slots: Tensor<3, Int>,
}

impl NsaStep {
    /// Makes the inputs of the group `at`; `writes` are those of all groups.
    pub(super) fn new(
        groups: &[Group],
        at: usize,
        (steps, writes): (&[KvStep], &[Vec<Writes>]),
        seq: usize,
        is_dense: bool,
        device: &Device,
    ) -> Result<Option<Self>, PoolError> {
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
    /// For prompts, which begin with the first token.
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
                // Entries after a prompt's end are not stored.
                let slot = (last < writes.tokens).then(|| writes.slots[last]);
                slot.map_or(-1, |slot| slot.div_euclid(nsa.stride as i32))
            })
        });
        (count > 0).then(|| Self {
            of_pages: None,
            slots: ints(slots.collect(), [writes.len(), 1, count], device),
        })
    }

    /// For sequences with earlier tokens, which are in pages.
    fn of_pages(
        nsa: &NsaHeadsConfig,
        (tokens, steps): (&Group, &[KvStep]),
        writes: &[Writes],
        device: &Device,
    ) -> Result<Option<Self>, PoolError> {
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

/// Blocks that end: rows of their tokens, head after head, positions of their last tokens, and slots of their pairs.
#[derive(Default)]
struct Rows {
    ids: Vec<i32>,
    last: Vec<i32>,
    slots: Vec<i32>,
}

impl Rows {
    /// Adds the blocks of a sequence, whose tokens are in pages of the group. Returns whether there are any.
    fn add(
        &mut self,
        nsa: &NsaHeadsConfig,
        (tokens, id): (&Group, SequenceId),
        writes: &Writes,
    ) -> Result<bool, PoolError> {
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

/// Inputs of captured steps of one token per sequence. They have a block per sequence, whether one ends or not.
pub(super) struct NsaInputs {
    groups: BranchGroups,
    /// `[batch · kv_heads · block]`
    ids: StaticInput<1, Int>,
    /// `[batch]`
    last: StaticInput<1, Int>,
    /// `[batch, 1, 1]`
    slots: StaticInput<3, Int>,
}

impl NsaInputs {
    pub(super) fn new(
        group: &Group,
        batch: usize,
        device: &Device,
    ) -> Result<Option<Self>, PoolError> {
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

    /// Writes the blocks that end, for one of the groups.
    pub(super) fn write(
        &self,
        groups: &[Group],
        group: &Group,
        (batch, writes): (&[SequenceId], &[Writes]),
    ) -> Result<(), PoolError> {
        let nsa = group.key.nsa.as_ref().ok_or_else(lost)?;
        let mut rows = Rows::default();
        for (&id, writes) in batch.iter().zip(writes) {
            if !rows.add(nsa, (&groups[self.groups.tokens], id), writes)? {
                // A dummy block, which is not stored.
                rows.ids.extend(vec![0; group.key.kv_heads * nsa.block]);
                rows.last.push(0);
                rows.slots.push(-1);
            }
        }
        overwrite(&self.ids, rows.ids)?;
        overwrite(&self.last, rows.last)?;
        overwrite(&self.slots, rows.slots)?;
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
