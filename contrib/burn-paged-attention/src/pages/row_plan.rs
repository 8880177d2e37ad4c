//! The slots of one query, where it does not see all that is live.

use super::pool::{PagePool, SequenceId};
use super::{CacheError, KvRetention};
use blocksparse::internal::Repeat;

/// The slots that hold the keys of one query, each once.
///
/// Slots are counted along the sequence's row of the page table: slot `x` is slot `x mod P` of page `table[⌊x / P⌋]`, whichever region it is in. So a plan
/// holds until the next step of the sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowPlan {
    /// Runs of slots that repeat: few, however long the sequence is, where the pattern repeats and its keys lie side by side.
    pub repeats: Vec<SlotRuns>,
}

/// Runs of as many slots at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRuns {
    /// The first slot of the first run.
    pub first: usize,
    /// Slots of a run.
    pub slots: usize,
    /// From the first slot of a run to that of the next.
    pub period: usize,
    /// Runs.
    pub times: usize,
}

impl RowPlan {
    /// Slots of all runs: keys that the query sees.
    pub fn slots(&self) -> usize {
        self.repeats
            .iter()
            .map(|runs| runs.slots * runs.times)
            .sum()
    }

    /// First slot and number of slots of each run in the order in which they are read, permanent slots and then timed ones: as few runs as there can be.
    pub fn runs(&self) -> Vec<(usize, usize)> {
        let each = |runs: &SlotRuns| {
            let SlotRuns {
                first,
                slots,
                period,
                times,
            } = *runs;
            (0..times).map(move |k| (first + k * period, slots))
        };
        let mut runs: Vec<(usize, usize)> = self.repeats.iter().flat_map(each).collect();
        runs.sort_unstable();
        runs.dedup_by(|next, run| {
            let is_next = run.0 + run.1 == next.0;
            if is_next {
                run.1 += next.1;
            }
            is_next
        });
        runs
    }

    /// A tensor `[repeats, 4]`: `first, slots, period, times`.
    pub fn to_i32(&self) -> Vec<i32> {
        let numbers = |runs: &SlotRuns| [runs.first, runs.slots, runs.period, runs.times];
        let numbers = self.repeats.iter().flat_map(numbers);
        numbers.map(|number| number as i32).collect()
    }

    /// Adds runs after others; a run that continues what repeats is one time more.
    fn push(&mut self, slots: Repeat) {
        let first = slots.keys.start;
        if slots.times == 1 {
            match self.repeats.last_mut() {
                Some(last) if last.times == 1 && last.first + last.slots == first => {
                    last.slots += slots.keys.len();
                    last.period = last.slots;
                    return;
                }
                Some(last) if last.slots == slots.keys.len() && last.times == 1 => {
                    if let Some(period) = first.checked_sub(last.first) {
                        last.period = period;
                        last.times = 2;
                        return;
                    }
                }
                Some(last)
                    if last.slots == slots.keys.len()
                        && last.first + last.period * last.times == first =>
                {
                    last.times += 1;
                    return;
                }
                _ => {}
            }
        }
        self.repeats.push(SlotRuns {
            first,
            slots: slots.keys.len(),
            period: slots.period,
            times: slots.times,
        });
    }
}

impl PagePool {
    /// The slots that the query at a position of a sequence reads in `head`, from the pattern and without a layout: in O(1) where keys repeat in a
    /// region without gaps, otherwise in O(runs), for callbacks in O(keys).
    /// Keys after the sequence's last token are not there yet; those that were evicted are none of the runs, so only queries from
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
        blocksparse::ensure! {
            CacheError;
            head < self.config.heads => "head", format!("below the {} heads", self.config.heads), head;
            query <= super::config::MOST_POSITIONS => "query", format!("at most {}", super::config::MOST_POSITIONS), query;
        }
        let row = &sequence.rows[self.row_of_head(head)];
        let mut keys = self.config.pattern.row_keys(head, query, sequence.next);
        if let KvRetention::Window { window, sinks } = sequence.residency {
            let from = (query + 1).saturating_sub(window).max(sinks);
            let parts = keys.iter().flat_map(|keys| {
                let sinks = keys.within(0..sinks);
                sinks.into_iter().chain(keys.within(from..sequence.next))
            });
            keys = parts.collect();
        }
        let mut plan = RowPlan::default();
        let first_timed = row.timed_entry * self.config.page_size;
        for (region, shift) in [(&row.permanent, 0), (&row.timed, first_timed)] {
            for keys in &keys {
                region.slots_of(keys, |slots| {
                    plan.push(Repeat {
                        keys: slots.keys.start + shift..slots.keys.end + shift,
                        ..slots
                    });
                });
            }
        }
        Ok(plan)
    }
}
