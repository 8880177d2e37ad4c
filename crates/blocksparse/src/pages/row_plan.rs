//! The slots of one query, where it does not see all that is live.

use std::ops::Range;

use super::pool::{PagePool, SequenceId};
use super::{CacheError, Residency};

/// The slots that hold the keys of one query, as runs in the order of the walk: permanent slots, then timed ones.
///
/// Slots are counted along the sequence's row of the page table: slot `x` is slot `x mod P` of page `table[⌊x / P⌋]`, whichever region it is in. So a plan
/// holds until the next step of the sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowPlan {
    /// First slot and number of slots of each run: as few runs as there can be.
    pub runs: Vec<(usize, usize)>,
}

impl RowPlan {
    /// Slots of all runs: keys that the query sees.
    pub fn slots(&self) -> usize {
        self.runs.iter().map(|&(_, slots)| slots).sum()
    }

    /// The runs as a tensor `[runs, 2]`.
    pub fn to_i32(&self) -> Vec<i32> {
        let numbers = self.runs.iter().flat_map(|&(first, slots)| [first, slots]);
        numbers.map(|number| number as i32).collect()
    }

    fn push(&mut self, slots: Range<usize>) {
        match self.runs.last_mut() {
            Some((first, count)) if *first + *count == slots.start => *count += slots.len(),
            _ => self.runs.push((slots.start, slots.len())),
        }
    }
}

impl PagePool {
    /// The slots that the query at a position of a sequence reads in `head`, from the pattern: O(runs) for everything but callbacks, without a layout.
    /// Keys behind the sequence's last token are not there yet; those that were let go are none of the runs, so only queries from
    /// [`oldest`](Self::oldest) on read all that the pattern says.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::Argument`] if there is no such head.
    pub fn row_plan(
        &self,
        id: SequenceId,
        head: usize,
        query: usize,
    ) -> Result<RowPlan, CacheError> {
        let sequence = self.sequence(id)?;
        if head >= self.config.heads {
            let expected = format!("below the {} heads", self.config.heads);
            return Err(CacheError::argument("head", expected, head));
        }
        if query > super::config::MOST_POSITIONS {
            let expected = format!("at most {}", super::config::MOST_POSITIONS);
            return Err(CacheError::argument("query", expected, query));
        }
        let row = &sequence.rows[self.row_of_head(head)];
        let mut keys = self.config.pattern.row_keys(head, query, sequence.next);
        if let Residency::Window { window, sinks } = sequence.residency {
            let from = (query + 1).saturating_sub(window).max(sinks);
            let of_window = |range: Range<usize>| {
                let sinks = range.start..range.end.min(sinks);
                [sinks, range.start.max(from)..range.end]
            };
            let parts = keys.into_iter().flat_map(of_window);
            keys = parts.filter(|part| !part.is_empty()).collect();
        }
        let mut plan = RowPlan::default();
        let first_timed = row.timed_entry * self.config.page_size;
        for (region, shift) in [(&row.permanent, 0), (&row.timed, first_timed)] {
            for keys in &keys {
                for slots in region.slots_of(keys.clone()) {
                    plan.push(slots.start + shift..slots.end + shift);
                }
            }
        }
        Ok(plan)
    }
}
