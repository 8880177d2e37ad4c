//! Pages with their reference counts, and the sequences of a pool.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use blocksparse::LastUse;
use serde::{Deserialize, Serialize};

use super::config::PoolConfig;
use super::known::KnownPages;
use super::lifetimes::Lifetimes;
use super::sequence::Sequence;
use super::{CacheError, KvRetention};

/// A sequence of a [`PagePool`]. Ids ascend and are never reused, so equal calls on equal pools give equal ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// A pool of pages that assigns a page and a slot to each key of each sequence. See the [module](super).
///
/// Every method that returns an error leaves the pool as it was. Free pages are taken lowest first.
#[derive(Clone, Debug)]
pub struct PagePool {
    pub(super) config: PoolConfig,
    pub(super) lifetimes: Lifetimes,
    /// Number of table rows that reference each page, up to the last page that was ever in use.
    pub(super) refs: Vec<u32>,
    /// Pages of `refs` without references whose contents are not known either.
    pub(super) free: BTreeSet<u32>,
    pub(super) known: KnownPages,
    /// Pages without references.
    pub(super) unused: usize,
    pub(super) sequences: BTreeMap<SequenceId, Sequence>,
    next_id: u64,
}

impl PagePool {
    /// Makes a pool whose pages are all free.
    ///
    /// # Errors
    /// [`CacheError::Argument`] naming the value out of range.
    pub fn new(config: PoolConfig) -> Result<Self, CacheError> {
        config.validate()?;
        Ok(Self {
            lifetimes: Lifetimes::new(&config),
            refs: Vec::new(),
            free: BTreeSet::new(),
            known: KnownPages::default(),
            unused: config.pages,
            sequences: BTreeMap::new(),
            next_id: 0,
            config,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &PoolConfig {
        &self.config
    }

    /// Returns the rows of a sequence in the page table: 1 if all KV heads retain the same keys, otherwise one for each KV head.
    pub fn table_rows(&self) -> usize {
        self.lifetimes.rows()
    }

    /// Returns the table row of a query head.
    pub fn row_of_head(&self, head: usize) -> usize {
        head / self.lifetimes.heads_of_row()
    }

    /// Returns the pages that no sequence references, whether their contents are known or not.
    pub fn free_pages(&self) -> usize {
        self.unused
    }

    /// Returns the table rows that reference a page: 0 if it is free, 2 or more if it is shared.
    pub fn references(&self, page: usize) -> usize {
        self.refs.get(page).map_or(0, |&refs| refs as usize)
    }

    /// Returns the sequences in the order in which they joined.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.sequences.keys().copied()
    }

    /// Adds a sequence without tokens.
    ///
    /// # Errors
    /// [`CacheError::Argument`] if a window is out of range, or the retention is [`KvRetention::Evict`] and the heads are not plainly causal.
    pub fn join(&mut self, residency: KvRetention) -> Result<SequenceId, CacheError> {
        residency.validate()?;
        self.check_evictable(residency)?;
        Ok(self.enter(Sequence::new(residency, self.table_rows())))
    }

    /// Removes a sequence and frees its pages that no other one references.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn leave(&mut self, id: SequenceId) -> Result<(), CacheError> {
        let sequence = self.sequences.remove(&id);
        let sequence = sequence.ok_or(CacheError::Unknown { id })?;
        self.known.tick();
        for page in sequence.pages() {
            self.release(page);
        }
        Ok(())
    }

    /// Adds a sequence with the tokens of another one. They share pages; a page is copied before either writes to it.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, CacheError> {
        let copy = self.sequence(id)?.clone();
        for page in copy.pages() {
            self.refs[page as usize] += 1;
        }
        Ok(self.enter(copy))
    }

    /// Returns the number of tokens of a sequence, which is the position of its next one.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn len(&self, id: SequenceId) -> Result<usize, CacheError> {
        Ok(self.sequence(id)?.next)
    }

    /// Returns the fewest tokens that a sequence can be [`truncate`](Self::truncate)d to.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn oldest(&self, id: SequenceId) -> Result<usize, CacheError> {
        Ok(self.sequence(id)?.oldest)
    }

    /// Rolls a sequence back to `len` tokens.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::Argument`] if the sequence has fewer tokens; [`CacheError::Gone`] if keys that would be live again are
    /// gone; [`CacheError::Boundary`] if the pattern has no boundary there.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<(), CacheError> {
        let sequence = self.sequence(id)?;
        blocksparse::ensure! { CacheError; len <= sequence.next => "len", format!("at most the {} tokens of {id}", sequence.next), len; }
        if len < sequence.oldest {
            return Err(CacheError::Gone {
                asked: len,
                oldest: sequence.oldest,
            });
        }
        if len == sequence.next {
            return Ok(());
        }
        self.check_boundary(len)?;
        let page_size = self.config.page_size;
        let sequence = self.sequences.get_mut(&id).expect("it was found");
        sequence.next = len;
        sequence.chain.truncate(len / page_size);
        let mut dropped = Vec::new();
        for row in &mut sequence.rows {
            dropped.extend(row.permanent.drop_from(len, page_size));
            dropped.extend(row.timed.drop_from(len, page_size));
            if row.timed.pages.is_empty() {
                row.timed_entry = row.permanent.pages.len();
            }
        }
        self.known.tick();
        for page in dropped {
            self.release(page);
        }
        Ok(())
    }

    /// Rolls a sequence back by `tokens` tokens.
    ///
    /// # Errors
    /// Those of [`truncate`](Self::truncate).
    pub fn rollback(&mut self, id: SequenceId, tokens: usize) -> Result<(), CacheError> {
        let next = self.sequence(id)?.next;
        let len = next.checked_sub(tokens).ok_or_else(|| {
            let expected = format!("at most the {next} tokens of {id}");
            CacheError::argument("tokens", expected, tokens)
        })?;
        self.truncate(id, len)
    }

    /// Checks that the pattern allows eviction, if the retention asks for it.
    pub(super) fn check_evictable(&self, residency: KvRetention) -> Result<(), CacheError> {
        blocksparse::ensure! {
            CacheError;
            residency != KvRetention::Evict || self.lifetimes.is_causal() => "pattern",
                "the dense causal pattern in every head where a cache evicts keys by attention", &self.config.pattern;
        }
        Ok(())
    }

    pub(super) fn sequence(&self, id: SequenceId) -> Result<&Sequence, CacheError> {
        self.sequences.get(&id).ok_or(CacheError::Unknown { id })
    }

    pub(super) fn enter(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, sequence);
        id
    }

    /// Checks that no query before a position sees a key at or after it.
    pub(crate) fn check_boundary(&self, position: usize) -> Result<(), CacheError> {
        let last = match self
            .config
            .pattern
            .furthest_key(self.config.heads, position)
        {
            LastUse::Never => return Ok(()),
            LastUse::At(last) => usize::try_from(last).ok(),
            LastUse::Always => None,
        };
        Err(CacheError::Boundary {
            position,
            last,
            next: self
                .config
                .pattern
                .next_boundary(self.config.heads, position),
        })
    }

    /// Removes one reference to a page. Returns whether the page is free now: without references, and not kept for its known contents.
    pub(super) fn release(&mut self, page: u32) -> bool {
        let refs = &mut self.refs[page as usize];
        *refs -= 1;
        if *refs > 0 {
            return false;
        }
        self.unused += 1;
        !self.known.keeps(page) && self.free.insert(page)
    }

    /// Takes the lowest free page, with one reference. If there is none, forgets the least useful known contents. The caller has checked that a page
    /// is available.
    pub(super) fn take(&mut self) -> u32 {
        let is_fresh_left = self.refs.len() < self.config.pages;
        while self.free.is_empty() && !is_fresh_left && self.forget_least_useful() {}
        self.unused -= 1;
        let Some(page) = self.free.pop_first() else {
            debug_assert!(is_fresh_left, "enough pages are free");
            self.refs.push(1);
            return self.refs.len() as u32 - 1;
        };
        self.refs[page as usize] = 1;
        page
    }

    /// Returns the number of stored keys of a sequence, over all its table rows.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn stored(&self, id: SequenceId) -> Result<usize, CacheError> {
        let rows = self.sequence(id)?.rows.iter();
        Ok(rows
            .map(|row| row.permanent.slots() + row.timed.slots())
            .sum())
    }

    /// Returns the pages and keys of a sequence. Visits each timed key, and each permanent one too if all keys are retained.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn usage(&self, id: SequenceId) -> Result<Usage, CacheError> {
        let sequence = self.sequence(id)?;
        let mut usage = Usage {
            stored: self.stored(id)?,
            ..Usage::default()
        };
        for (at, row) in sequence.rows.iter().enumerate() {
            let pages = row.pages().count();
            let [permanent, timed] = row.regions().map(|region| {
                let last = |position| self.lifetimes.last(sequence.residency, at, position);
                let is_live = move |&position: &usize| last(position) >= sequence.next as i32;
                region.positions().filter(is_live)
            });
            let live_for_ever = match sequence.residency {
                // Not all keys that are retained are live.
                KvRetention::All => permanent.count(),
                KvRetention::Reachable | KvRetention::Window { .. } | KvRetention::Evict => {
                    row.permanent.slots()
                }
            };
            usage.live += live_for_ever + timed.count();
            usage.pages += pages;
            usage.slots += pages * self.config.page_size;
        }
        Ok(usage)
    }
}

/// Pages and keys of a sequence, over all its table rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Keys that the next query or a later one attends to.
    pub live: usize,
    /// Keys that are stored.
    pub stored: usize,
    /// Pages that its table references, shared ones included.
    pub pages: usize,
    /// Slots of those pages.
    pub slots: usize,
}

impl Usage {
    /// Returns the bytes of the slots in all layers that share the pool's block tables. `of_slot` is the bytes of a slot: its keys and values in all
    /// those layers, and of all KV heads if these share a table row.
    pub fn bytes(&self, of_slot: usize) -> usize {
        self.slots * of_slot
    }

    /// Returns the bytes of the live keys and values.
    pub fn live_bytes(&self, of_slot: usize) -> usize {
        self.live * of_slot
    }
}
