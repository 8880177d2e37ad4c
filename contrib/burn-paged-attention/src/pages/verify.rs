//! Consistency checks of the block tables.

use std::collections::BTreeSet;

use super::lifetimes::Lifetimes;
use super::pool::PagePool;
use super::sequence::Sequence;
use super::{ALWAYS, CacheError, KvRetention};

impl PagePool {
    /// Checks all invariants that hold between two calls. Visits every token of every sequence, so it is for tests.
    ///
    /// - Each key that is live, or would be after a rollback, has one slot; no key has two.
    /// - A slot is in the filled range of one region or unused; pages without a used slot are free.
    /// - The reference count of a page is the number of table rows that reference it; a page without references is free. A row references no page
    ///   twice. Rows share a page only if they are the same row of different sequences.
    /// - Positions ascend within a region, permanent keys are in the permanent region and timed ones in the other, and no position is after the last token.
    /// - Entries of the page table do not overlap.
    ///
    /// # Errors
    /// [`CacheError::Corrupt`] with the first contradiction.
    pub fn verify(&self) -> Result<(), CacheError> {
        let mut named: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); self.refs.len()];
        let mut refs = vec![0u32; self.refs.len()];
        for (&id, sequence) in &self.sequences {
            self.verify_sequence(&id.to_string(), sequence)?;
            for (at, row) in sequence.rows.iter().enumerate() {
                if let Some(page) = row.has_twice() {
                    let what = format!("{id} names page {page} twice in row {at}");
                    return Err(CacheError::corrupt(what));
                }
                for page in row.pages() {
                    let page = page as usize;
                    if page >= self.refs.len() {
                        let what = format!("{id} names page {page}, which was never taken");
                        return Err(CacheError::corrupt(what));
                    }
                    named[page].insert(at);
                    refs[page] += 1;
                }
            }
        }
        for (page, &expected) in refs.iter().enumerate() {
            let kept = self.refs[page];
            let (is_free, is_known) = (
                self.free.contains(&(page as u32)),
                self.known.names(page as u32),
            );
            let is_counted = match kept {
                0 => is_free != is_known,
                _ => !is_free,
            };
            if expected != kept || !is_counted || named[page].len() > 1 {
                let what = format!(
                    "page {page} is named {expected} times, by rows {:?}; its references are {kept}, free: {is_free}",
                    named[page]
                );
                return Err(CacheError::corrupt(what));
            }
        }
        let used = refs.iter().filter(|&&refs| refs > 0).count();
        let idle = self.idle_pages();
        let fresh = self.config.pages - self.refs.len();
        let free = self.free.len() + fresh + idle;
        let most = self.free.last().map_or(0, |&last| last as usize + 1);
        let is_whole = used + free == self.config.pages && most <= self.refs.len();
        match is_whole && self.unused == free {
            true => self.check_known(),
            false => Err(CacheError::corrupt(format!(
                "{used} pages are used and {free} free, {idle} of them known, of {}; {} are counted",
                self.config.pages, self.unused
            ))),
        }
    }

    /// Checks one sequence like [`Self::verify`], except for its pages.
    pub(super) fn verify_sequence(
        &self,
        name: &str,
        sequence: &Sequence,
    ) -> Result<(), CacheError> {
        let page_size = self.config.page_size;
        if sequence.rows.len() != self.table_rows() || sequence.oldest > sequence.next {
            let what = format!(
                "{name} has {} rows, or forgot the future",
                sequence.rows.len()
            );
            return Err(CacheError::corrupt(what));
        }
        for (at, row) in sequence.rows.iter().enumerate() {
            let corrupt = |what: String| CacheError::corrupt(format!("{name}, row {at}: {what}"));
            for region in row.regions() {
                region.check(page_size).map_err(corrupt)?;
            }
            if row.timed_entry < row.permanent.pages.len() && !row.timed.pages.is_empty() {
                return Err(corrupt("entries of both regions overlap".to_string()));
            }
            let [mut permanent, mut timed] =
                row.regions().map(|region| region.positions().peekable());
            let (stored, mut seen) = (row.permanent.slots() + row.timed.slots(), 0);
            // After evictions the remaining keys count as those of the last positions.
            let first = match (sequence.residency, row.permanent.runs().next()) {
                (KvRetention::Evict, Some(run)) => run.start,
                (KvRetention::Evict, None) => sequence.next,
                _ => 0,
            };
            if first > sequence.oldest {
                let what = format!(
                    "keys before {first} are gone, those from {} on are needed",
                    sequence.oldest
                );
                return Err(corrupt(what));
            }
            for position in 0..sequence.next {
                let last = self.lifetimes.last(sequence.residency, at, position);
                let kept = Lifetimes::kept_until(sequence.residency, last);
                let is_permanent = permanent.next_if_eq(&position).is_some();
                let is_timed = timed.next_if_eq(&position).is_some();
                let fits = match kept {
                    _ if position < first => !is_permanent && !is_timed,
                    ALWAYS => is_permanent && !is_timed,
                    kept if kept >= sequence.oldest as i32 => is_timed && !is_permanent,
                    _ => !is_permanent,
                };
                if !fits {
                    return Err(corrupt(format!(
                        "the key at {position}, last seen at {last}, is stored as permanent: {is_permanent}, as timed: {is_timed}"
                    )));
                }
                seen += usize::from(is_permanent) + usize::from(is_timed);
            }
            if seen != stored {
                let what = format!("{stored} keys are stored, {seen} of tokens that there are");
                return Err(corrupt(what));
            }
        }
        Ok(())
    }
}
