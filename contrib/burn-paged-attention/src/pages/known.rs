//! Known contents of pages: the tokens of their keys.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::KvRetention;

/// Pages of one page's worth of tokens, one page per table row.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub hash: u64,
    /// Entry of the preceding tokens.
    pub parent: Option<u64>,
    pub residency: KvRetention,
    pub tokens: Box<[u32]>,
    pub pages: Vec<u32>,
    /// Number of preceding entries.
    pub depth: usize,
    pub children: Vec<u64>,
    /// Time at which one of its pages was last freed.
    pub used: u64,
}

/// All known pages, numbered in the order in which they became known.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownPages {
    pub known: BTreeMap<u64, Known>,
    pub by_hash: BTreeMap<u64, Vec<u64>>,
    /// Entry number of each known page.
    pub of_page: BTreeMap<u32, u64>,
    /// Entries with unreferenced pages: least recently used first, then longer chains first.
    pub idle: BTreeSet<(u64, Reverse<usize>, u64)>,
    pub next: u64,
    pub clock: u64,
}

impl KnownPages {
    /// Advances the clock. Entries freed at one time were last used at that time.
    pub fn tick(&mut self) {
        self.clock += 1;
    }

    /// Notes that a page has no reference any more. Returns whether it is kept for its contents.
    pub fn keeps(&mut self, page: u32) -> bool {
        let Some(&number) = self.of_page.get(&page) else {
            return false;
        };
        let known = self
            .known
            .get_mut(&number)
            .expect("pages are of what is known");
        self.idle
            .remove(&(known.used, Reverse(known.depth), number));
        known.used = self.clock;
        self.idle.insert((known.used, Reverse(known.depth), number));
        true
    }

    /// Returns whether a page's contents are known.
    pub fn names(&self, page: u32) -> bool {
        self.of_page.contains_key(&page)
    }

    /// Returns the entry to forget first if a page is needed.
    pub fn least_useful(&self) -> Option<u64> {
        self.idle.first().map(|&(.., number)| number)
    }

    /// Forgets an entry and all that follow it. Returns their pages.
    pub fn forget(&mut self, number: u64) -> Vec<u32> {
        let mut pages = Vec::new();
        let mut numbers = vec![number];
        while let Some(number) = numbers.pop() {
            let Some(known) = self.known.remove(&number) else {
                continue;
            };
            if let Some(parent) = known.parent.and_then(|parent| self.known.get_mut(&parent)) {
                parent.children.retain(|&child| child != number);
            }
            self.idle
                .remove(&(known.used, Reverse(known.depth), number));
            let same = self.by_hash.get_mut(&known.hash).expect("it has a hash");
            same.retain(|&other| other != number);
            if same.is_empty() {
                self.by_hash.remove(&known.hash);
            }
            for page in known.pages {
                self.of_page.remove(&page);
                pages.push(page);
            }
            numbers.extend(known.children);
        }
        pages
    }

    /// Adds an entry. Returns its number.
    pub fn learn(&mut self, known: Known) -> u64 {
        let number = self.next;
        self.next += 1;
        for &page in &known.pages {
            self.of_page.insert(page, number);
        }
        if let Some(parent) = known.parent.and_then(|parent| self.known.get_mut(&parent)) {
            parent.children.push(number);
        }
        self.by_hash.entry(known.hash).or_default().push(number);
        self.known.insert(number, known);
        number
    }

    pub fn find(
        &self,
        hash: u64,
        parent: Option<u64>,
        residency: KvRetention,
        tokens: &[u32],
    ) -> Option<u64> {
        let same = self.by_hash.get(&hash)?.iter().copied();
        let is_it = |number: &u64| {
            let known = &self.known[number];
            known.parent == parent && known.residency == residency && *known.tokens == *tokens
        };
        same.into_iter().find(is_it)
    }

    /// Checks that the indices by page, by hash and by number agree.
    pub fn check(&self, refs: &[u32]) -> Result<(), String> {
        let pages: usize = self.known.values().map(|known| known.pages.len()).sum();
        if pages != self.of_page.len() {
            return Err(format!(
                "{} of {pages} known pages are found",
                self.of_page.len()
            ));
        }
        for (&number, known) in &self.known {
            let is_idle = known.pages.iter().any(|&page| refs[page as usize] == 0);
            let entry = (known.used, Reverse(known.depth), number);
            let is_found = self
                .by_hash
                .get(&known.hash)
                .is_some_and(|same| same.contains(&number));
            let has_pages = known
                .pages
                .iter()
                .all(|page| self.of_page.get(page) == Some(&number));
            let has_parent = known.parent.is_none_or(|parent| {
                let parent = self.known.get(&parent);
                parent.is_some_and(|parent| parent.children.contains(&number))
            });
            if is_idle != self.idle.contains(&entry) || !is_found || !has_pages || !has_parent {
                return Err(format!(
                    "known pages {:?}: idle {is_idle}, found {is_found}, by page {has_pages}, by parent {has_parent}",
                    known.pages
                ));
            }
        }
        match self
            .idle
            .iter()
            .all(|(.., number)| self.known.contains_key(number))
        {
            true => Ok(()),
            false => Err("a forgotten page is idle".to_string()),
        }
    }
}
