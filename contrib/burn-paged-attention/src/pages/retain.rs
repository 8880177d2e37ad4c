//! Retention of selected keys, whatever the pattern says, and eviction of the others.

use super::pool::{PagePool, SequenceId};
use super::region::Region;
use super::{CacheError, KvRetention};

/// Slots of the keys that a sequence retains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retained {
    /// For each table row, in order: `page · page_size + slot`.
    pub slots: Vec<Vec<i32>>,
    /// Pages that became free.
    pub freed: Vec<usize>,
}

impl PagePool {
    /// Retains `counts` keys in each table row of a sequence and evicts the others. The caller selects them, reads them from their slots
    /// ([`slot_keys`](Self::slot_keys), before this call), and writes them in order to the slots that this call returns. Those are at the front of
    /// the row's pages, and in fresh pages in place of shared ones.
    ///
    /// From then on the keys count as those of the last positions: a row with `n` of them has the positions from `len − n` on, whatever they were.
    /// So anything that depends only on the order of positions still works, and nothing that depends on distances: [`KvRetention::Evict`] refuses
    /// patterns other than causal ones when a sequence joins. The sequence cannot be [`truncate`](Self::truncate)d to less than it has now, or by
    /// more than the pool's rollback; the keys of the last tokens that can be rolled back must be among the retained ones.
    ///
    /// Rebuild the page table ([`tables`](Self::tables)) afterwards.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::OutOfPages`]; [`CacheError::Argument`] if the sequence's retention is another, the number of counts is
    /// not that of the table rows, or a count is above the row's number of keys or below the number that can be rolled back.
    pub fn retain(&mut self, id: SequenceId, counts: &[usize]) -> Result<Retained, CacheError> {
        let page_size = self.config.page_size;
        let sequence = self.sequence(id)?;
        blocksparse::ensure! {
            CacheError;
            sequence.residency == KvRetention::Evict => "residency",
                "that of a sequence whose keys are evicted", format!("{:?} of {id}", sequence.residency);
            counts.len() == sequence.rows.len() => "counts", format!("one for each of the {} table rows", sequence.rows.len()), counts.len();
        }
        let next = sequence.next;
        let oldest = (next.saturating_sub(self.config.rollback)).max(sequence.oldest);
        // Count the released pages, and the shared pages that need a new copy.
        let (mut released, mut asked) = (0, 0);
        for (row, &count) in sequence.rows.iter().zip(counts) {
            let stored = row.permanent.slots();
            blocksparse::ensure! {
                CacheError;
                count <= stored && count + oldest >= next => "counts", format!("from {} to the {stored} keys of the row", next - oldest), count;
            }
            if count == stored {
                continue;
            }
            let needed = count.div_ceil(page_size);
            let pages = row.permanent.pages.iter().enumerate();
            for (at, &page) in pages {
                let is_shared = self.refs[page as usize] > 1;
                asked += usize::from(at < needed && is_shared);
                released += usize::from(at >= needed && !is_shared);
            }
        }
        let free = self.unused + released;
        if asked > free {
            return Err(CacheError::OutOfPages { asked, free });
        }
        self.known.tick();
        let mut sequence = self.sequences.remove(&id).expect("it was found");
        let mut retained = Retained::default();
        // Release first: pages that one row frees are available to all rows.
        for (row, &count) in sequence.rows.iter().zip(counts) {
            if count < row.permanent.slots() {
                let dropped = row.permanent.pages.iter().skip(count.div_ceil(page_size));
                let freed = dropped.filter(|&&page| self.release(page));
                retained.freed.extend(freed.map(|&page| page as usize));
            }
        }
        for (row, &count) in sequence.rows.iter_mut().zip(counts) {
            let needed = count.div_ceil(page_size);
            let old = std::mem::take(&mut row.permanent);
            if count == old.slots() {
                row.permanent = old;
            } else {
                let mut region = Region::default();
                region.pages.extend(old.pages.iter().take(needed));
                for page in &mut region.pages {
                    match self.refs[*page as usize] {
                        1 => self.forget_page(*page),
                        _ => {
                            let fresh = self.take();
                            self.release(*page);
                            *page = fresh;
                        }
                    }
                }
                for position in next - count..next {
                    region.push(position, page_size);
                }
                row.permanent = region;
            }
            row.timed_entry = row.permanent.pages.len();
            retained
                .slots
                .push(row.permanent.slot_numbers(page_size).collect());
        }
        sequence.oldest = oldest;
        sequence.chain.clear();
        self.sequences.insert(id, sequence);
        Ok(retained)
    }
}
