//! What kernels are told of a batch of sequences.

use super::pool::{PagePool, SequenceId};
use super::writes::{Slot, SlotKey};
use super::{CacheError, KvRetention};

/// The page table of a batch and which of its slots are in use, as kernels read them.
///
/// A row of the table is one table row of a sequence, rows of a sequence follow each other. The permanent region is slots `0..permanent_slots` of the pages
/// `table[0..]`. The timed region is slots `timed_start..timed_start + timed_slots` of the pages `table[timed_first_entry..]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    /// Sequences times table rows.
    pub rows: usize,
    /// Entries of a row.
    pub max_pages: usize,
    /// `[rows, max_pages]`: pages, −1 where an entry is not in use.
    pub table: Vec<i32>,
    /// `[rows, 4]`: `permanent_slots, timed_first_entry, timed_start, timed_slots`.
    pub spans: Vec<i32>,
    /// `[sequences]`: the position of the next token.
    pub next: Vec<i32>,
    /// The most slots that a row has in use.
    pub most_slots: usize,
}

impl PagePool {
    /// The page table of a batch, as wide as its sequences ask for: a power of two.
    ///
    /// # Errors
    /// [`CacheError::Unknown`], [`CacheError::Twice`]
    pub fn tables(&self, batch: &[SequenceId]) -> Result<Tables, CacheError> {
        self.check_batch(batch)?;
        let rows = || batch.iter().flat_map(|id| &self.sequences[id].rows);
        let max_pages = rows().map(|row| row.width()).max().unwrap_or(1);
        let max_pages = max_pages.next_power_of_two();
        let mut table = vec![-1; rows().count() * max_pages];
        for (row, entries) in rows().zip(table.chunks_mut(max_pages)) {
            for (entry, page) in row.table_from(0, 0) {
                entries[entry] = page as i32;
            }
        }
        let slots = rows().map(|row| row.permanent.slots() + row.timed.slots());
        let next = batch.iter().map(|id| self.sequences[id].next as i32);
        Ok(Tables {
            rows: rows().count(),
            max_pages,
            table,
            spans: self.spans(batch)?,
            next: next.collect(),
            most_slots: slots.max().unwrap_or(0),
        })
    }

    /// The spans of a batch alone, 16 bytes a row: what changes in every step, while of the table a few entries do
    /// ([`Writes::changes`](super::Writes)).
    ///
    /// # Errors
    /// As [`Self::tables`].
    pub fn spans(&self, batch: &[SequenceId]) -> Result<Vec<i32>, CacheError> {
        self.check_batch(batch)?;
        let rows = batch.iter().flat_map(|id| &self.sequences[id].rows);
        Ok(rows
            .flat_map(|row| row.span().map(|number| number as i32))
            .collect())
    }

    /// Pages at the beginning of the permanent regions of a batch that all of its sequences share, filled to the end, in each table row: what forks of one
    /// sequence have in common. Every later query sees their keys: where keys are kept that it does not ([`KvRetention::All`]), no page counts.
    ///
    /// # Errors
    /// As [`Self::tables`].
    pub fn shared_pages(&self, batch: &[SequenceId]) -> Result<usize, CacheError> {
        self.check_batch(batch)?;
        let full = |at: usize, id: &SequenceId| {
            let region = &self.sequences[id].rows[at].permanent;
            let full = region.slots() / self.config.page_size;
            region.pages.range(..full)
        };
        let Some((first, others)) = batch.split_first() else {
            return Ok(0);
        };
        let keeps_all = self.lifetimes.is_everything_kept(KvRetention::Reachable);
        let keeps_more = |id| self.sequences[id].residency == KvRetention::All && !keeps_all;
        if batch.iter().any(keeps_more) {
            return Ok(0);
        }
        let of_row = |at: usize| {
            let alike = |id| {
                let pairs = full(at, first).zip(full(at, id));
                pairs.take_while(|(a, b)| a == b).count()
            };
            others.iter().map(alike).min().unwrap_or(0)
        };
        Ok((0..self.table_rows()).map(of_row).min().unwrap_or(0))
    }

    /// The keys that a table row of a sequence stores, in the order of its slots: first the permanent ones, then the timed ones.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::Argument`] if there is no such row.
    pub fn slot_keys(&self, id: SequenceId, row: usize) -> Result<Vec<SlotKey>, CacheError> {
        let sequence = self.sequence(id)?;
        let books = sequence.rows.get(row).ok_or_else(|| {
            let expected = format!("below the {} table rows", sequence.rows.len());
            CacheError::argument("row", expected, row)
        })?;
        let page_size = self.config.page_size;
        let keys = books.regions().into_iter().flat_map(|region| {
            region.positions().enumerate().map(move |(at, position)| {
                let at = region.start + at;
                SlotKey {
                    slot: Slot {
                        page: region.pages[at / page_size] as usize,
                        slot: at % page_size,
                    },
                    position,
                    last: self.lifetimes.last(sequence.residency, row, position),
                }
            })
        });
        Ok(keys.collect())
    }

    /// Slots that queries of a pool see, as two tensors `[pages, page_size]`: each slot's position, and the last query that attends to it. Slots without a key have
    /// [`ALWAYS`](super::ALWAYS) and [`NEVER`](super::NEVER), so that no query sees them. Made anew from all sequences: a step changes what
    /// [`Writes`](super::Writes) says.
    pub fn visibility(&self) -> [Vec<i32>; 2] {
        let slots = self.config.pages * self.config.page_size;
        let mut positions = vec![super::ALWAYS; slots];
        let mut last = vec![super::NEVER; slots];
        for (&id, sequence) in &self.sequences {
            for row in 0..sequence.rows.len() {
                for key in self.slot_keys(id, row).expect("there is such a row") {
                    let slot = key.slot.page * self.config.page_size + key.slot.slot;
                    positions[slot] = key.position as i32;
                    last[slot] = key.last;
                }
            }
        }
        [positions, last]
    }

    /// Returns whether a query sees a stored key just if it is at the key's position or later and no later than its last query, in every head:
    /// then kernels need nothing but [`Writes::last`](super::Writes). Otherwise queries are told their own [`row_slots`](Self::row_slots).
    pub fn row_is_live(&self) -> bool {
        self.lifetimes.row_is_live()
    }

    /// The places along a sequence's row of the page table that the query at a position reads in `head`, ascending: place `x` is slot `x mod P` of page
    /// `table[⌊x / P⌋]`, whichever region it is in, until the next step of the sequence. Found from the pattern without a layout, in O(keys) that it sees.
    /// Keys after the sequence's last token are not there yet, and evicted ones are gone, so only queries from [`oldest`](Self::oldest) on read all
    /// that the pattern says.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::Argument`] if there is no such head.
    pub fn row_slots(
        &self,
        id: SequenceId,
        head: usize,
        query: usize,
    ) -> Result<Vec<usize>, CacheError> {
        let sequence = self.sequence(id)?;
        blocksparse::ensure! {
            CacheError;
            head < self.config.heads => "head", format!("below the {} heads", self.config.heads), head;
            query <= super::config::MOST_POSITIONS => "query", format!("at most {}", super::config::MOST_POSITIONS), query;
        }
        let seen = match sequence.residency {
            KvRetention::Window { window, sinks } => {
                let from = (query + 1).saturating_sub(window).max(sinks);
                [0..sinks, from..sequence.next]
            }
            _ => [0..sequence.next, 0..0],
        };
        let row = &sequence.rows[self.row_of_head(head)];
        let first_timed = row.timed_entry * self.config.page_size;
        let mut places = Vec::new();
        for keys in self.config.pattern.row_keys(head, query, sequence.next) {
            for (keys, part) in keys
                .ranges()
                .flat_map(|keys| seen.iter().map(move |part| (keys.clone(), part)))
            {
                let keys = keys.start.max(part.start)..keys.end.min(part.end);
                places.extend(row.permanent.slots_of(keys.clone()));
                places.extend(row.timed.slots_of(keys).map(|slot| first_timed + slot));
            }
        }
        places.sort_unstable();
        Ok(places)
    }

    /// Returns whether the query of a single new token ([`Step::decode`](super::Step::decode)) sees every slot that its sequence has then: kernels need no positions for it. Otherwise slots
    /// are also kept for queries that may come again, or the pattern is not [`row_is_live`](Self::row_is_live).
    pub fn single_sees_all(&self, residency: KvRetention) -> bool {
        let lets_go_at_once = self.config.rollback == 0
            && residency != KvRetention::All
            && self.lifetimes.dies_in_order(residency);
        let nothing_dies = self.lifetimes.is_everything_kept(KvRetention::Reachable)
            && !matches!(residency, KvRetention::Window { .. });
        self.row_is_live() && (lets_go_at_once || nothing_dies)
    }

    /// That the sequences of a batch are different ones that there are.
    pub(crate) fn check_batch(&self, batch: &[SequenceId]) -> Result<(), CacheError> {
        let mut sorted = batch.to_vec();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(CacheError::Twice { id: pair[0] });
        }
        for &id in batch {
            self.sequence(id)?;
        }
        Ok(())
    }
}
