//! One sequence's part of the books.

use std::collections::BTreeSet;

use super::KvRetention;
use super::region::Region;

/// What a sequence keeps of its tokens.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sequence {
    pub residency: KvRetention,
    /// Tokens so far: the position of the next one.
    pub next: usize,
    /// The fewest tokens that can be gone back to: every key whose last query is there or later is stored.
    pub oldest: usize,
    pub rows: Vec<Row>,
    /// Names of its first full pages.
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

    /// Every page that a table row names, with repetitions if the books are wrong.
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
    /// The entry of the page table at which the timed region begins. It moves on with the region's first page, so that no other entry changes;
    /// where the permanent region or the end of the table comes too near, all timed entries are written anew further on or back.
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

    /// Entries between the permanent region and a timed one that is placed anew: as many more permanent pages come before it is moved again.
    fn gap(&self) -> usize {
        match self.permanent.pages.is_empty() {
            true => 0,
            false => self.timed.pages.len(),
        }
    }

    /// Entries of the page table that the row may use: a power of two. The timed region moves on within it for at least as many pages as it has, so that
    /// writing its entries anew costs a constant for each page.
    pub fn entries(&self) -> usize {
        let timed = self.timed.pages.len();
        (self.permanent.pages.len() + self.gap() + 2 * timed).next_power_of_two()
    }

    /// Places the timed entries where they fit, after pages came or went; whether all of them are placed anew.
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

    /// Entries that a table must have for the row as it is.
    pub fn width(&self) -> usize {
        self.entries()
            .max(self.timed_entry + self.timed.pages.len())
    }

    /// The page table's entries in use and their pages, those of the two regions from some of their pages on.
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

    /// Pages named twice by this row.
    pub fn has_twice(&self) -> Option<u32> {
        let mut seen = BTreeSet::new();
        self.pages().find(|&page| !seen.insert(page))
    }
}
