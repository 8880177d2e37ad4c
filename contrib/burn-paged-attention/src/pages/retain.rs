//! Keys that are chosen, whatever the pattern says: the others are evicted.

use super::pool::{PagePool, SequenceId};
use super::region::Region;
use super::{CacheError, KvRetention};

/// Slots of the keys that a sequence retains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retained {
    /// For each table row, in order: `page · page_size + slot`.
    pub slots: Vec<Vec<i32>>,
    /// Pages that nobody names any more.
    pub freed: Vec<usize>,
}

impl PagePool {
    /// Keeps so many keys of each table row of a sequence, and lets the others go: the caller chooses which, reads them from the slots where they are
    /// ([`slot_keys`](Self::slot_keys), before this), and writes them in order to the slots that this says. These are those at the front of the row's pages,
    /// and of fresh pages where others name the old ones.
    ///
    /// From then on the keys count as those of the last positions: a row with `n` of them has the positions from `len − n` on, whichever they were. So all that
    /// depends on the order of positions alone goes on working, and nothing that depends on distances: patterns other than causal ones are refused when a sequence
    /// joins with [`KvRetention::Evict`]. The sequence cannot be [`truncate`](Self::truncate)d to less than it has now, or by more than the pool's rollback;
    /// the keys of the last tokens that may be taken back must be among those that are kept.
    ///
    /// The page table has to be made anew ([`tables`](Self::tables)).
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::OutOfPages`]; [`CacheError::Argument`] if the sequence's residency is another, there are not as many counts as
    /// table rows, or one of them is above the keys that the row has or below those that can be taken back.
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
        // What is evicted, and shared pages that are written elsewhere.
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
        // What any row lets go is there for all of them.
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
