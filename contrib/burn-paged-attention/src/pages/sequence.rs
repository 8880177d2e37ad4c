//! State of one sequence.

use std::collections::BTreeSet;

use super::KvRetention;
use super::region::Region;

/// Stored keys of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sequence {
    pub residency: KvRetention,
    /// Number of tokens so far: the position of the next one.
    pub next: usize,
    /// The fewest tokens that can be rolled back to: every key whose last query is there or later is stored.
    pub oldest: usize,
    pub rows: Vec<Row>,
    /// Entry numbers of its first full pages among the known ones.
    pub chain: Vec<u64>,
}

impl Sequence {
    pub fn new(residency: KvRetention, rows: usize) -> Self {
        Self {
            residency,
            next: 0,
            oldest: 0,
            rows: vec![Row::default(); rows],
            chain: Vec::new(),
        }
    }

    /// Returns the pages of all table rows, with repetitions if the tables are corrupt.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.rows.iter().flat_map(Row::pages)
    }
}

/// One row of a sequence's page table.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Row {
    /// Keys that every later query may attend to.
    pub permanent: Region,
    /// Keys with a last query.
    pub timed: Region,
    /// Entry of the page table at which the timed region begins. It advances with the region's first page, so that no other entry changes. If the
    /// permanent region or the end of the table comes too close, all timed entries are rewritten at another place.
    pub timed_entry: usize,
}

impl Row {
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.permanent
            .pages
            .iter()
            .chain(&self.timed.pages)
            .copied()
    }

    pub fn regions(&self) -> [&Region; 2] {
        [&self.permanent, &self.timed]
    }

    /// Returns the entries between the permanent region and a newly placed timed one: the number of permanent pages that fit before the timed region
    /// moves again.
    fn gap(&self) -> usize {
        match self.permanent.pages.is_empty() {
            true => 0,
            false => self.timed.pages.len(),
        }
    }

    /// Returns the entries of the page table that the row may use: a power of two. Within it the timed region can advance by at least as many pages
    /// as it has, so that rewriting its entries costs amortized constant time per page.
    pub fn entries(&self) -> usize {
        let timed = self.timed.pages.len();
        (self.permanent.pages.len() + self.gap() + 2 * timed).next_power_of_two()
    }

    /// Places the timed entries where they fit, after pages were added or removed. Returns whether all of them moved.
    pub fn place(&mut self) -> bool {
        let permanent = self.permanent.pages.len();
        let timed = self.timed.pages.len();
        let fits = self.timed_entry >= permanent && self.timed_entry + timed <= self.entries();
        if timed == 0 {
            self.timed_entry = permanent;
        } else if !fits {
            self.timed_entry = permanent + self.gap();
            return true;
        }
        false
    }

    /// Returns the width that a table must have for the row.
    pub fn width(&self) -> usize {
        self.entries()
            .max(self.timed_entry + self.timed.pages.len())
    }

    /// Returns the used entries of the page table with their pages, from page `permanent` and page `timed` of the two regions on.
    pub fn table_from(
        &self,
        permanent: usize,
        timed: usize,
    ) -> impl Iterator<Item = (usize, u32)> + '_ {
        let pages = self.permanent.pages.range(permanent..).copied();
        let of_permanent = (permanent..).zip(pages);
        let pages = self.timed.pages.range(timed..).copied();
        of_permanent.chain((self.timed_entry + timed..).zip(pages))
    }

    /// `[permanent_slots, timed_first_entry, timed_start, timed_slots]`
    pub fn span(&self) -> [usize; 4] {
        [
            self.permanent.slots(),
            self.timed_entry,
            self.timed.start,
            self.timed.slots(),
        ]
    }

    /// Returns a page that this row references twice, if any.
    pub fn has_twice(&self) -> Option<u32> {
        let mut seen = BTreeSet::new();
        self.pages().find(|&page| !seen.insert(page))
    }
}
