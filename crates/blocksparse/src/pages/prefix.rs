//! Pages whose contents are known by their tokens, for sequences that begin alike.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::lifetimes::Lifetimes;
use super::pool::{PagePool, SequenceId};
use super::region::Region;
use super::sequence::{Row, Sequence};
use super::{ALWAYS, CacheError, Residency};

/// The pages of as many tokens as a page has slots, one of each table row.
#[derive(Clone, Debug)]
struct Known {
    hash: u64,
    /// The pages of the tokens before.
    parent: Option<u64>,
    residency: Residency,
    tokens: Box<[u32]>,
    pages: Vec<u32>,
    /// Pages before it.
    depth: usize,
    children: Vec<u64>,
    /// When one of its pages was last let go.
    used: u64,
}

/// All known pages, numbered in the order in which they became known.
#[derive(Clone, Debug, Default)]
pub(super) struct KnownPages {
    known: BTreeMap<u64, Known>,
    by_hash: BTreeMap<u64, Vec<u64>>,
    /// By page what it is of.
    of_page: BTreeMap<u32, u64>,
    /// What no sequence names, at least in part: used longest ago first, then longer chains first.
    idle: BTreeSet<(u64, Reverse<usize>, u64)>,
    next: u64,
    clock: u64,
}

impl KnownPages {
    /// A point in time: what is let go at once is used last at once.
    pub fn tick(&mut self) {
        self.clock += 1;
    }

    /// A page is named by nobody now; whether it is kept for its contents.
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

    /// Whether a page is known by its contents.
    pub fn names(&self, page: u32) -> bool {
        self.of_page.contains_key(&page)
    }

    /// What is to be forgotten if a page is needed.
    fn least_useful(&self) -> Option<u64> {
        self.idle.first().map(|&(.., number)| number)
    }

    /// Forgets pages and all that come after them: which ones.
    fn forget(&mut self, number: u64) -> Vec<u32> {
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

    /// Knows pages from now on: their number.
    fn learn(&mut self, known: Known) -> u64 {
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

    fn find(
        &self,
        hash: u64,
        parent: Option<u64>,
        residency: Residency,
        tokens: &[u32],
    ) -> Option<u64> {
        let same = self.by_hash.get(&hash)?.iter().copied();
        let is_it = |number: &u64| {
            let known = &self.known[number];
            known.parent == parent && known.residency == residency && *known.tokens == *tokens
        };
        same.into_iter().find(is_it)
    }

    /// That what is known by page, by hash and by number is the same.
    fn check(&self, refs: &[u32]) -> Result<(), String> {
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

impl PagePool {
    /// Tells what the tokens of a sequence are, from its first one on: its full pages are known from now on, and found by
    /// [`join_with_prefix`](Self::join_with_prefix), also after it has left, until the pages are needed. To be called when their keys are written. Of pages that
    /// are known already only the tokens that follow are looked at. Pages that have let keys go, or whose keys have different lifetimes, do not become known.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::Argument`] if the pool was made without
    /// [`PoolConfig::with_prefix_reuse`](super::PoolConfig::with_prefix_reuse), or there are more tokens than the sequence has.
    pub fn remember(&mut self, id: SequenceId, tokens: &[u32]) -> Result<(), CacheError> {
        let fingerprint = self.fingerprint()?;
        let page_size = self.config.page_size;
        let sequence = self.sequence(id)?;
        if tokens.len() > sequence.next {
            let expected = format!("at most the {} tokens of {id}", sequence.next);
            return Err(CacheError::argument("tokens", expected, tokens.len()));
        }
        let residency = sequence.residency;
        let whole = sequence
            .rows
            .iter()
            .map(|row| whole_region(row).whole_from_start());
        let whole = whole.min().unwrap_or(0);
        let sequence = self.sequences.get_mut(&id).expect("it was found");
        let mut chain = std::mem::take(&mut sequence.chain);
        // Forgotten pages that the sequence still has can be known again.
        while chain
            .last()
            .is_some_and(|last| !self.known.known.contains_key(last))
        {
            chain.pop();
        }
        for depth in chain.len()..whole.min(tokens.len()) / page_size {
            let tokens = &tokens[depth * page_size..(depth + 1) * page_size];
            let parent = chain.last().copied();
            let hash = self.hash(fingerprint, parent, residency, tokens);
            if let Some(known) = self.known.find(hash, parent, residency, tokens) {
                chain.push(known);
                continue;
            }
            let rows = self.sequences[&id].rows.iter();
            let pages: Vec<u32> = rows.map(|row| whole_region(row).pages[depth]).collect();
            // A page is known once: by what it was first written for.
            if pages.iter().any(|&page| self.known.names(page)) {
                break;
            }
            chain.push(self.known.learn(Known {
                hash,
                parent,
                residency,
                tokens: tokens.into(),
                pages,
                depth,
                children: Vec::new(),
                used: self.known.clock,
            }));
        }
        self.sequences.get_mut(&id).expect("it was found").chain = chain;
        Ok(())
    }

    /// Tokens of a prompt whose keys are known: whole pages, less than the prompt so that its last token is computed, and up to where a sequence may stop.
    ///
    /// # Errors
    /// [`CacheError::Argument`] if the pool was made without prefix reuse.
    pub fn known_prefix(&self, residency: Residency, tokens: &[u32]) -> Result<usize, CacheError> {
        Ok(self.chain(residency, tokens, usize::MAX)?.len() * self.config.page_size)
    }

    /// A new sequence that has the beginning of a prompt, as [`known_prefix`](Self::known_prefix) says but no more than `at_most` tokens,
    /// and how many those are. It shares their pages. Where several pools serve the layers of a model, all of them have to join with as many tokens: ask each what it knows of the prompt, cut the
    /// prompt behind the token after the least of these, and ask again until they agree.
    ///
    /// # Errors
    /// As [`Self::join`] and [`Self::known_prefix`].
    pub fn join_with_prefix(
        &mut self,
        residency: Residency,
        tokens: &[u32],
        at_most: usize,
    ) -> Result<(SequenceId, usize), CacheError> {
        residency.validate()?;
        let chain = self.chain(residency, tokens, at_most)?;
        let page_size = self.config.page_size;
        let mut sequence = Sequence::new(residency, self.table_rows());
        let count = chain.len() * page_size;
        for (at, row) in sequence.rows.iter_mut().enumerate() {
            if count == 0 {
                break;
            }
            let last = Lifetimes::kept_until(residency, self.lifetimes.last(residency, at, 0));
            let region = match last {
                ALWAYS => &mut row.permanent,
                _ => &mut row.timed,
            };
            for known in &chain {
                region.pages.push_back(self.known.known[known].pages[at]);
            }
            for position in 0..count {
                region.push(position, page_size);
            }
            row.timed_entry = row.permanent.pages.len();
        }
        for page in sequence.pages() {
            self.unused -= usize::from(self.refs[page as usize] == 0);
            self.refs[page as usize] += 1;
        }
        for &number in &chain {
            let known = &self.known.known[&number];
            let entry = (known.used, Reverse(known.depth), number);
            if known.pages.iter().all(|&page| self.refs[page as usize] > 0) {
                self.known.idle.remove(&entry);
            }
        }
        sequence.next = count;
        sequence.chain = chain;
        Ok((self.enter(sequence), count))
    }

    /// The known pages that a prompt begins with.
    fn chain(
        &self,
        residency: Residency,
        tokens: &[u32],
        at_most: usize,
    ) -> Result<Vec<u64>, CacheError> {
        let fingerprint = self.fingerprint()?;
        let page_size = self.config.page_size;
        // One row has to be computed.
        let usable = tokens.len().saturating_sub(1).min(at_most);
        let mut chain = Vec::new();
        for tokens in tokens[..usable].chunks_exact(page_size) {
            let parent = chain.last().copied();
            let hash = self.hash(fingerprint, parent, residency, tokens);
            match self.known.find(hash, parent, residency, tokens) {
                Some(known) => chain.push(known),
                None => break,
            }
        }
        while !chain.is_empty() && self.check_boundary(chain.len() * page_size).is_err() {
            chain.pop();
        }
        Ok(chain)
    }

    /// The contents of a page change.
    pub(super) fn forget_page(&mut self, page: u32) {
        if let Some(&number) = self.known.of_page.get(&page) {
            self.forget(number);
        }
    }

    /// Forgets the contents that are needed least, so that there are free pages; whether there were any.
    pub(super) fn forget_least_useful(&mut self) -> bool {
        let number = self.known.least_useful();
        number.inspect(|&number| self.forget(number)).is_some()
    }

    fn forget(&mut self, number: u64) {
        for page in self.known.forget(number) {
            if self.refs[page as usize] == 0 {
                self.free.insert(page);
            }
        }
    }

    /// Pages that no sequence names and whose contents are known.
    pub fn idle_pages(&self) -> usize {
        let known = self
            .known
            .idle
            .iter()
            .map(|(.., number)| &self.known.known[number]);
        let pages = known.flat_map(|known| &known.pages);
        pages.filter(|&&page| self.refs[page as usize] == 0).count()
    }

    pub(super) fn check_known(&self) -> Result<(), CacheError> {
        self.known.check(&self.refs).map_err(CacheError::corrupt)
    }

    fn fingerprint(&self) -> Result<u64, CacheError> {
        self.config.reuse.ok_or_else(|| {
            CacheError::argument("config", "one with prefix reuse", "one without it")
        })
    }

    /// What pages are found by; tokens and what came before are compared, so different ones may have the same.
    fn hash(
        &self,
        fingerprint: u64,
        parent: Option<u64>,
        residency: Residency,
        tokens: &[u32],
    ) -> u64 {
        let mut hasher = DefaultHasher::new();
        let parent = parent.map(|parent| self.known.known[&parent].hash);
        (fingerprint, parent, residency, tokens).hash(&mut hasher);
        hasher.finish() & self.config.hash_mask
    }
}

/// The region of a row that has its first keys.
fn whole_region(row: &Row) -> &Region {
    let [permanent, timed] = row.regions();
    match permanent.whole_from_start() >= timed.whole_from_start() {
        true => permanent,
        false => timed,
    }
}
