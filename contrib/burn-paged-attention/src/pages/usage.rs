//! How much of a pool is in use.

use super::pool::{PagePool, SequenceId};
use super::{CacheError, KvRetention};

/// Pages and keys of a sequence, over all its table rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Keys that some query from the next one on attends to.
    pub live: usize,
    /// Keys that are stored.
    pub stored: usize,
    /// Pages that its table names, shared ones included.
    pub pages: usize,
    /// Slots of those pages.
    pub slots: usize,
}

impl Usage {
    /// Bytes of the slots in the layers that share the pool's books: each slot takes `of_slot` bytes, its keys and values of all those layers, and of all
    /// KV heads if they share a table row.
    pub fn bytes(&self, of_slot: usize) -> usize {
        self.slots * of_slot
    }

    /// Bytes of the live keys and values alone.
    pub fn live_bytes(&self, of_slot: usize) -> usize {
        self.live * of_slot
    }
}

impl PagePool {
    /// Keys that a sequence stores, over all its table rows.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn stored(&self, id: SequenceId) -> Result<usize, CacheError> {
        let rows = self.sequence(id)?.rows.iter();
        Ok(rows
            .map(|row| row.permanent.slots() + row.timed.slots())
            .sum())
    }

    /// Returns the pages and keys of a sequence. Looks at each of its timed keys, and where all keys are retained at each key.
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
                // Where all keys are kept, not all of them are live.
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
