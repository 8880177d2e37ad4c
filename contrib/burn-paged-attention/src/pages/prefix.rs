//! Known contents of pages, for sequences that begin with the same tokens.

use std::cmp::Reverse;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::known::Known;
use super::lifetimes::Lifetimes;
use super::pool::{PagePool, SequenceId};
use super::region::Region;
use super::sequence::{Row, Sequence};
use super::{ALWAYS, CacheError, KvRetention};

impl PagePool {
    /// Registers the tokens of a sequence, from its first one on, so that [`join_with_prefix`](Self::join_with_prefix) finds its full pages, even
    /// after it has left, until the pages are needed. Call it when their keys are written. Of pages that are known already only the following tokens
    /// are examined. Pages with evicted keys, or with keys of different lifetimes, are not registered.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::Argument`] if the pool was made without
    /// [`PoolConfig::with_prefix_reuse`](super::PoolConfig::with_prefix_reuse), or there are more tokens than the sequence has.
    pub fn remember(&mut self, id: SequenceId, tokens: &[u32]) -> Result<(), CacheError> {
        let fingerprint = self.fingerprint()?;
        let page_size = self.config.page_size;
        let sequence = self.sequence(id)?;
        blocksparse::ensure! {
            CacheError;
            tokens.len() <= sequence.next => "tokens", format!("at most the {} tokens of {id}", sequence.next), tokens.len();
        }
        let residency = sequence.residency;
        let whole = sequence
            .rows
            .iter()
            .map(|row| whole_region(row).whole_from_start());
        let whole = whole.min().unwrap_or(0);
        let sequence = self.sequences.get_mut(&id).expect("it was found");
        let mut chain = std::mem::take(&mut sequence.chain);
        // Forgotten pages that the sequence still has can be registered again.
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
            // A page is registered only once, for its first contents.
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

    /// Returns the number of a prompt's tokens whose keys are known: in whole pages, fewer than the prompt so that its last token is computed, and
    /// at a boundary of the pattern.
    ///
    /// # Errors
    /// [`CacheError::Argument`] if the pool was made without prefix reuse.
    pub fn known_prefix(
        &self,
        residency: KvRetention,
        tokens: &[u32],
    ) -> Result<usize, CacheError> {
        Ok(self.chain(residency, tokens, usize::MAX)?.len() * self.config.page_size)
    }

    /// Adds a sequence with the beginning of a prompt, of the length of [`known_prefix`](Self::known_prefix) but at most `at_most` tokens, and
    /// returns that length. It shares the pages. If several pools serve the layers of a model, all must join with the same length: ask each for its
    /// known prefix, truncate the prompt to one token more than the least of these, and ask again until they agree.
    ///
    /// # Errors
    /// Those of [`Self::join`] and [`Self::known_prefix`].
    pub fn join_with_prefix(
        &mut self,
        residency: KvRetention,
        tokens: &[u32],
        at_most: usize,
    ) -> Result<(SequenceId, usize), CacheError> {
        residency.validate()?;
        self.check_evictable(residency)?;
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

    /// Returns the known pages that a prompt begins with.
    fn chain(
        &self,
        residency: KvRetention,
        tokens: &[u32],
        at_most: usize,
    ) -> Result<Vec<u64>, CacheError> {
        let fingerprint = self.fingerprint()?;
        let page_size = self.config.page_size;
        // The last token has to be computed.
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

    /// Forgets the contents of a page that changes.
    pub(super) fn forget_page(&mut self, page: u32) {
        if let Some(&number) = self.known.of_page.get(&page) {
            self.forget(number);
        }
    }

    /// Forgets the least useful contents, to free pages. Returns whether there were any.
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

    /// Returns the unreferenced pages whose contents are known.
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

    /// Hashes the key of an entry. Lookups compare tokens and parent, so collisions are harmless.
    fn hash(
        &self,
        fingerprint: u64,
        parent: Option<u64>,
        residency: KvRetention,
        tokens: &[u32],
    ) -> u64 {
        let mut hasher = DefaultHasher::new();
        let parent = parent.map(|parent| self.known.known[&parent].hash);
        (fingerprint, parent, residency, tokens).hash(&mut hasher);
        hasher.finish() & self.config.hash_mask
    }
}

/// Returns the region that has the row's first keys.
fn whole_region(row: &Row) -> &Region {
    let [permanent, timed] = row.regions();
    match permanent.whole_from_start() >= timed.whole_from_start() {
        true => permanent,
        false => timed,
    }
}
