//! Tables that kernels read for a batch of sequences.

use super::pool::{PagePool, SequenceId};
use super::writes::{Slot, SlotKey};
use super::{CacheError, KvRetention};

/// Page table of a batch and its slots in use, as kernels read them.
///
/// Each row belongs to one table row of a sequence; the rows of a sequence are adjacent. The permanent region is slots `0..permanent_slots` of the
/// pages `table[0..]`. The timed region is slots `timed_start..timed_start + timed_slots` of the pages `table[timed_first_entry..]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tables {
    /// Number of sequences times table rows.
    pub rows: usize,
    /// Number of entries of a row.
    pub max_pages: usize,
    /// `[rows, max_pages]`: pages; −1 for unused entries.
    pub table: Vec<i32>,
    /// `[rows, 4]`: `permanent_slots, timed_first_entry, timed_start, timed_slots`.
    pub spans: Vec<i32>,
    /// `[sequences]`: position of the next token.
    pub next: Vec<i32>,
    /// Largest number of used slots of a row.
    pub most_slots: usize,
}

impl PagePool {
    /// Returns the page table of a batch. Its width is the least power of two that fits the sequences.
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

    /// Returns the spans of a batch alone, 16 bytes a row. They change in every step, whereas few table entries do
    /// ([`Writes::changes`](super::Writes)).
    ///
    /// # Errors
    /// Those of [`Self::tables`].
    pub fn spans(&self, batch: &[SequenceId]) -> Result<Vec<i32>, CacheError> {
        self.check_batch(batch)?;
        let rows = batch.iter().flat_map(|id| &self.sequences[id].rows);
        Ok(rows
            .flat_map(|row| row.span().map(|number| number as i32))
            .collect())
    }

    /// Returns the number of full pages that all sequences of a batch share at the beginning of their permanent regions, in each table row: the
    /// common part of forks. Every later query sees their keys. With [`KvRetention::All`], which also retains keys that later queries do not see,
    /// the number is 0.
    ///
    /// # Errors
    /// Those of [`Self::tables`].
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

    /// Returns the keys that a table row of a sequence stores, in the order of its slots: permanent ones, then timed ones.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::Argument`] if the row does not exist.
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

    /// Returns the visibility of slots as two tensors `[pages, page_size]`: each slot's position, and the last query that attends to it. Empty slots
    /// have [`ALWAYS`](super::ALWAYS) and [`NEVER`](super::NEVER), so that no query sees them. Computed from all sequences;
    /// [`Writes`](super::Writes) has the changes of a step.
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

    /// Returns whether, in every head, a query sees a stored key exactly if it is at the key's position or later and no later than the key's last
    /// query. Then kernels need only [`Writes::last`](super::Writes). Otherwise each query needs its own [`row_slots`](Self::row_slots).
    pub fn row_is_live(&self) -> bool {
        self.lifetimes.row_is_live()
    }

    /// Returns the places in a sequence's row of the page table that the query at a position reads in `head`, ascending: place `x` is slot `x mod P`
    /// of page `table[⌊x / P⌋]`, in either region, until the next step of the sequence. Derived from the pattern without a layout, in time linear in
    /// the keys that the query sees. Keys after the last token do not exist yet and evicted ones are gone, so only queries from
    /// [`oldest`](Self::oldest) on read all that the pattern says.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::Argument`] if the head does not exist.
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

    /// Returns whether the query of a single new token ([`Step::decode`](super::Step::decode)) sees every slot that its sequence has then, so that
    /// kernels need no positions. Otherwise slots are also retained for queries that a rollback may repeat, or the pattern is not
    /// [`row_is_live`](Self::row_is_live).
    pub fn single_sees_all(&self, residency: KvRetention) -> bool {
        let lets_go_at_once = self.config.rollback == 0
            && residency != KvRetention::All
            && self.lifetimes.dies_in_order(residency);
        let nothing_dies = self.lifetimes.is_everything_kept(KvRetention::Reachable)
            && !matches!(residency, KvRetention::Window { .. });
        self.row_is_live() && (lets_go_at_once || nothing_dies)
    }

    /// Checks that the sequences of a batch exist and are different.
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
