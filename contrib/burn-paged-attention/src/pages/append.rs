//! Appending of tokens: planned without changing the pool, then done.

use std::collections::{BTreeMap, BTreeSet};

use super::config::MOST_POSITIONS;
use super::lifetimes::Lifetimes;
use super::pool::{PagePool, SequenceId};
use super::region::Region;
use super::sequence::Sequence;
use super::writes::{PageCopy, TableChange, Writes};
use super::{ALWAYS, CacheError};

/// New tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Step {
    id: SequenceId,
    tokens: usize,
    is_prefill: bool,
    is_last: bool,
}

impl Step {
    /// A step whose queries read all keys from the pages, including those of the step itself. Keys that neither the new queries nor those after a
    /// possible rollback attend to are evicted before the new ones are written, so after an error [`PagePool::truncate`] undoes the whole step.
    pub fn decode(id: SequenceId, tokens: usize) -> Self {
        Self {
            id,
            tokens,
            is_prefill: false,
            is_last: false,
        }
    }

    /// A step whose queries have already been computed, from its own keys and from the pages before the step: keys that only these queries attend to
    /// are not written, or are freed. So call it after attention; tokens can be rolled back no further than by the rollback.
    pub fn prefill(id: SequenceId, tokens: usize) -> Self {
        Self {
            is_prefill: true,
            ..Self::decode(id, tokens)
        }
    }

    /// Marks the end of the sequence, which needs no boundary of the pattern.
    pub fn last(mut self) -> Self {
        self.is_last = true;
        self
    }
}

/// Effect of a step on one sequence.
struct Planned {
    id: SequenceId,
    tokens: usize,
    /// The first query that may come: keys whose last query is earlier are evicted.
    floor: usize,
    rows: Vec<PlannedRow>,
}

struct PlannedRow {
    /// Last query of each new key.
    last: Vec<i32>,
    /// Number of timed keys that are evicted.
    dropped: usize,
    permanent: usize,
    timed: usize,
}

/// Simulated reference counts and free pages.
struct Forecast<'a> {
    pool: &'a PagePool,
    refs: BTreeMap<u32, u32>,
    free: usize,
}

impl Forecast<'_> {
    fn refs(&self, page: u32) -> u32 {
        let now = self.pool.refs[page as usize];
        self.refs.get(&page).copied().unwrap_or(now)
    }

    fn release(&mut self, page: u32) {
        let left = self.refs(page) - 1;
        self.refs.insert(page, left);
        self.free += usize::from(left == 0);
    }
}

impl PagePool {
    /// Reserves slots for the next `tokens` tokens of a sequence ([`Step::decode`]), and returns where their keys go.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]; [`CacheError::OutOfPages`]; [`CacheError::Boundary`] if the pattern has no boundary after them;
    /// [`CacheError::Argument`] if the sequence would have 2³¹ tokens.
    pub fn append(&mut self, id: SequenceId, tokens: usize) -> Result<Writes, CacheError> {
        self.step(Step::decode(id, tokens))
    }

    /// Like [`Self::append`], for any [`Step`].
    ///
    /// # Errors
    /// Those of [`Self::append`].
    pub fn step(&mut self, step: Step) -> Result<Writes, CacheError> {
        let mut writes = self.steps(&[step])?;
        Ok(writes.pop().expect("one for each step"))
    }

    /// Does steps of different sequences, all or none. The pages that they free are available to each of them. The copies of all steps come before
    /// the writes of any.
    ///
    /// # Errors
    /// Those of [`Self::append`]; [`CacheError::Twice`].
    pub fn steps(&mut self, steps: &[Step]) -> Result<Vec<Writes>, CacheError> {
        let planned = self.plan(steps)?;
        let (asked, free) = self.forecast(&planned);
        if asked > free {
            return Err(CacheError::OutOfPages { asked, free });
        }
        self.known.tick();
        let freed: Vec<Vec<usize>> = planned.iter().map(|plan| self.let_go(plan)).collect();
        let planned = planned.into_iter().zip(freed);
        Ok(planned
            .map(|(plan, freed)| self.write(plan, freed))
            .collect())
    }

    /// Returns whether the next token of a sequence may cause a page copy, because it goes into a page that another sequence shares.
    ///
    /// # Errors
    /// [`CacheError::Unknown`]
    pub fn copies_next(&self, id: SequenceId) -> Result<bool, CacheError> {
        let page_size = self.config.page_size;
        let regions = self.sequence(id)?.rows.iter().flat_map(|row| row.regions());
        let mut pages = regions.filter_map(|region| {
            let filling = region.filling(0, page_size);
            filling.written_page(1, page_size)
        });
        Ok(pages.any(|page| self.refs[page as usize] > 1))
    }

    /// Returns the pages that steps would take and the pages available to them; with fewer available the steps fail with [`CacheError::OutOfPages`].
    ///
    /// # Errors
    /// Those of [`Self::steps`] except for [`CacheError::OutOfPages`].
    pub fn pages_needed(&self, steps: &[Step]) -> Result<(usize, usize), CacheError> {
        Ok(self.forecast(&self.plan(steps)?))
    }

    fn plan(&self, steps: &[Step]) -> Result<Vec<Planned>, CacheError> {
        let mut planned: Vec<Planned> = Vec::with_capacity(steps.len());
        let mut ids = BTreeSet::new();
        for step in steps {
            let id = step.id;
            if !ids.insert(id) {
                return Err(CacheError::Twice { id });
            }
            let sequence = self.sequence(id)?;
            let next = sequence.next;
            let most = MOST_POSITIONS - next;
            blocksparse::ensure! {
                CacheError;
                step.tokens <= most => "tokens", format!("at most {most} after the {next} tokens of {id}"), step.tokens;
            }
            if step.tokens > 0 && !self.config.pattern.is_causal() {
                self.check_boundary(next)?;
                if !step.is_last {
                    self.check_boundary(next + step.tokens)?;
                }
            }
            planned.push(self.plan_one(*step, sequence));
        }
        Ok(planned)
    }

    fn plan_one(&self, step: Step, sequence: &Sequence) -> Planned {
        let Sequence {
            residency, next, ..
        } = *sequence;
        let tokens = next..next + step.tokens;
        let is_everything_kept = self.lifetimes.is_everything_kept(residency);
        let first_query = match step.is_prefill {
            true => tokens.end,
            false => next,
        };
        let floor = match is_everything_kept || step.tokens == 0 {
            true => sequence.oldest,
            false => first_query
                .saturating_sub(self.config.rollback)
                .max(sequence.oldest),
        };
        let rows = sequence.rows.iter().enumerate().map(|(at, row)| {
            let last_of = |position| self.lifetimes.last(residency, at, position);
            let is_dead = |last: i32| last < floor as i32;
            let dropped = match is_everything_kept {
                true => 0,
                false => (row.timed.positions())
                    .take_while(|&position| is_dead(last_of(position)))
                    .count(),
            };
            let last: Vec<i32> = tokens.clone().map(last_of).collect();
            let kept = last
                .iter()
                .map(|&last| Lifetimes::kept_until(residency, last));
            let (mut permanent, mut timed) = (0, 0);
            for last in kept {
                match last {
                    ALWAYS => permanent += 1,
                    last if is_dead(last) => {}
                    _ => timed += 1,
                }
            }
            PlannedRow {
                last,
                dropped,
                permanent,
                timed,
            }
        });
        Planned {
            id: step.id,
            tokens: step.tokens,
            floor,
            rows: rows.collect(),
        }
    }

    /// Returns the pages that are taken, and those that are free by then.
    fn forecast(&self, planned: &[Planned]) -> (usize, usize) {
        let page_size = self.config.page_size;
        let mut forecast = Forecast {
            pool: self,
            refs: BTreeMap::new(),
            free: self.unused,
        };
        let rows = || {
            planned.iter().flat_map(|plan| {
                let rows = self.sequences[&plan.id].rows.iter();
                rows.zip(&plan.rows)
            })
        };
        for (row, plan) in rows() {
            let dead = row.timed.pages_of_oldest(plan.dropped, page_size);
            for &page in row.timed.pages.iter().take(dead) {
                forecast.release(page);
            }
        }
        let free = forecast.free;
        let mut asked = 0;
        for (row, plan) in rows() {
            let regions = [
                (row.permanent.filling(0, page_size), plan.permanent),
                (row.timed.filling(plan.dropped, page_size), plan.timed),
            ];
            for (filling, added) in regions {
                asked += filling.pages_for(added, page_size);
                let written = filling.written_page(added, page_size);
                if let Some(page) = written.filter(|&page| forecast.refs(page) > 1) {
                    forecast.release(page);
                    asked += 1;
                }
            }
        }
        (asked, free)
    }

    /// Evicts the keys that are dead before the step. Returns the pages that became free.
    fn let_go(&mut self, plan: &Planned) -> Vec<usize> {
        let page_size = self.config.page_size;
        let sequence = self.sequences.get_mut(&plan.id).expect("it was found");
        sequence.oldest = plan.floor;
        let mut dead = Vec::new();
        for (row, plan) in sequence.rows.iter_mut().zip(&plan.rows) {
            let pages = row.timed.drop_oldest(plan.dropped, page_size);
            row.timed_entry += pages.len();
            dead.extend(pages);
        }
        dead.retain(|&page| self.release(page));
        dead.into_iter().map(|page| page as usize).collect()
    }

    fn write(&mut self, plan: Planned, freed: Vec<usize>) -> Writes {
        let page_size = self.config.page_size;
        let mut sequence = self.sequences.remove(&plan.id).expect("it was found");
        let first = sequence.next;
        let mut writes = Writes {
            first,
            tokens: plan.tokens,
            rows: sequence.rows.len(),
            page_size,
            slots: Vec::with_capacity(sequence.rows.len() * plan.tokens),
            last: Vec::with_capacity(sequence.rows.len() * plan.tokens),
            freed,
            copies: Vec::new(),
            changes: Vec::new(),
            entries: 0,
        };
        for (at, (row, plan_row)) in sequence.rows.iter_mut().zip(plan.rows).enumerate() {
            // Changed table entries: the copied page and the new ones.
            let permanent = self.grow(&mut row.permanent, plan_row.permanent, &mut writes.copies);
            let timed = self.grow(&mut row.timed, plan_row.timed, &mut writes.copies);
            let is_placed_anew = row.place();
            let timed = if is_placed_anew { 0 } else { timed };
            let entries = row.table_from(permanent, timed);
            writes
                .changes
                .extend(entries.map(|(entry, page)| TableChange {
                    row: at,
                    entry,
                    page: page as usize,
                }));
            writes.entries = writes.entries.max(row.width());
            for (token, &last) in plan_row.last.iter().enumerate() {
                let kept = Lifetimes::kept_until(sequence.residency, last);
                let slot = match kept {
                    ALWAYS => Some(row.permanent.push(first + token, page_size)),
                    kept if kept < plan.floor as i32 => None,
                    _ => Some(row.timed.push(first + token, page_size)),
                };
                let number = |(page, slot)| (page as usize * page_size + slot) as i32;
                writes.slots.push(slot.map_or(-1, number));
            }
            writes.last.extend(plan_row.last);
        }
        sequence.next = first + plan.tokens;
        self.sequences.insert(plan.id, sequence);
        writes
    }

    /// Makes space for `added` more keys: copies the page that they begin in if it is shared, and takes new pages. Returns the index of the region's
    /// first changed page.
    fn grow(&mut self, region: &mut Region, added: usize, copies: &mut Vec<PageCopy>) -> usize {
        let page_size = self.config.page_size;
        let mut changed = region.pages.len();
        let filling = region.filling(0, page_size);
        let written = filling.written_page(added, page_size);
        if let Some(page) = written.filter(|&page| self.refs[page as usize] == 1) {
            self.forget_page(page);
        }
        if let Some(from) = written.filter(|&page| self.refs[page as usize] > 1) {
            let to = self.take();
            self.release(from);
            changed -= 1;
            region.pages[changed] = to;
            let first = match changed {
                0 => region.start,
                _ => 0,
            };
            copies.push(PageCopy {
                from: from as usize,
                to: to as usize,
                slots: first..region.filled() - changed * page_size,
            });
        }
        for _ in 0..filling.pages_for(added, page_size) {
            let page = self.take();
            region.pages.push_back(page);
        }
        changed
    }
}
