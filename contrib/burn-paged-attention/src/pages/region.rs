//! A list of pages whose slots are filled in order and freed in order.

use std::collections::VecDeque;
use std::ops::Range;

/// Keys in a list of pages, oldest first: slots `start..start + slots` of the pages are in use. Pages are freed whole: the first one when its last
/// slot is freed, and all of them when no key is left, so that no page waits for a key that does not exist.
///
/// It also holds the positions of its keys as runs of adjacent ones.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Region {
    pub pages: VecDeque<u32>,
    /// Slot of the oldest key in the first page.
    pub start: usize,
    /// Serial numbers of the oldest key and of the one after the youngest. `first` counts the evicted keys.
    first: usize,
    end: usize,
    stretches: VecDeque<Stretch>,
}

/// Keys of adjacent positions, up to the next stretch.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stretch {
    position: usize,
    /// Serial number of its first key.
    number: usize,
}

/// Fill state of a region's pages.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Filling {
    filled: usize,
    pages: usize,
    last: Option<u32>,
}

impl Filling {
    /// Returns the new pages that `more` keys take.
    pub fn pages_for(&self, more: usize, page_size: usize) -> usize {
        (self.filled + more).div_ceil(page_size) - self.pages
    }

    /// Returns the page in use that `more` keys are written to, if any.
    pub fn written_page(&self, more: usize, page_size: usize) -> Option<u32> {
        let is_open = !self.filled.is_multiple_of(page_size);
        self.last.filter(|_| more > 0 && is_open)
    }
}

impl Region {
    /// Returns the number of keys in use.
    pub fn slots(&self) -> usize {
        self.end - self.first
    }

    /// Returns the slots in use of a region from which no key was evicted, as `page · page_size + slot`.
    pub fn slot_numbers(&self, page_size: usize) -> impl Iterator<Item = i32> + '_ {
        let slots = self.pages.iter().flat_map(move |&page| {
            let first = page as usize * page_size;
            first..first + page_size
        });
        slots.take(self.slots()).map(|slot| slot as i32)
    }

    /// Returns the slots up to the youngest key, including freed ones of the first page.
    pub fn filled(&self) -> usize {
        self.start + self.slots()
    }

    /// Returns the fill state once the `count` oldest keys are evicted.
    pub fn filling(&self, count: usize, page_size: usize) -> Filling {
        match count == self.slots() {
            true => Filling::default(),
            false => Filling {
                filled: (self.start + count) % page_size + self.slots() - count,
                pages: self.pages.len() - self.pages_of_oldest(count, page_size),
                last: self.pages.back().copied(),
            },
        }
    }

    /// Returns the number of pages that are freed if the `count` oldest keys are evicted.
    pub fn pages_of_oldest(&self, count: usize, page_size: usize) -> usize {
        match count == self.slots() {
            true => self.pages.len(),
            false => (self.start + count) / page_size,
        }
    }

    /// Returns the number of positions from 0 on whose keys are in the region without a gap, if none was evicted: the key of position `p` is then in
    /// slot `p`.
    pub fn whole_from_start(&self) -> usize {
        let first = self.runs().next().filter(|run| run.start == 0);
        match self.first {
            0 => first.map_or(0, |run| run.end),
            _ => 0,
        }
    }

    /// Returns the positions of the keys, oldest first.
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.runs().flatten()
    }

    /// Returns the positions as contiguous ranges.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.stretches.len()).map(|at| self.run(at).0)
    }

    /// Returns the positions of a stretch, and the slot of its first key.
    fn run(&self, at: usize) -> (Range<usize>, usize) {
        let Stretch { position, number } = self.stretches[at];
        let end = (self.stretches.get(at + 1)).map_or(self.end, |next| next.number);
        let from = self.first.max(number);
        let positions = position + from - number..position + end - number;
        (positions, self.start + from - self.first)
    }

    /// Adds a key after all others, in a slot of an existing page. Returns page and slot.
    pub fn push(&mut self, position: usize, page_size: usize) -> (u32, usize) {
        let at = self.filled();
        let is_next = self
            .stretches
            .back()
            .is_some_and(|last| last.position + (self.end - last.number) == position);
        if !is_next {
            self.stretches.push_back(Stretch {
                position,
                number: self.end,
            });
        }
        self.end += 1;
        (self.pages[at / page_size], at % page_size)
    }

    /// Evicts the `count` oldest keys. Returns the freed pages.
    pub fn drop_oldest(&mut self, count: usize, page_size: usize) -> Vec<u32> {
        let pages = self.pages_of_oldest(count, page_size);
        self.first += count;
        if self.slots() == 0 {
            self.start = 0;
            self.stretches.clear();
        } else {
            self.start = (self.start + count) % page_size;
            while self
                .stretches
                .get(1)
                .is_some_and(|next| next.number <= self.first)
            {
                self.stretches.pop_front();
            }
        }
        self.pages.drain(..pages).collect()
    }

    /// Evicts the keys from a position on. Returns the freed pages.
    pub fn drop_from(&mut self, position: usize, page_size: usize) -> Vec<u32> {
        while let Some(last) = self.stretches.back() {
            if last.position < position {
                let kept = (position - last.position).min(self.end - last.number);
                self.end = (last.number + kept).max(self.first);
                break;
            }
            self.end = last.number.max(self.first);
            self.stretches.pop_back();
        }
        if self.slots() == 0 {
            self.start = 0;
            self.stretches.clear();
        }
        let needed = self.filled().div_ceil(page_size);
        self.pages.drain(needed..).collect()
    }

    /// Returns the slots of the keys at some positions, in order, counted through the region's pages.
    pub fn slots_of(&self, keys: Range<usize>) -> impl Iterator<Item = usize> + '_ {
        let after = |at: &Stretch| at.position <= keys.start;
        let first = self.stretches.partition_point(after).saturating_sub(1);
        let runs = (first..self.stretches.len()).map(|at| self.run(at));
        let runs = runs.take_while(move |(run, _)| run.start < keys.end);
        runs.flat_map(move |(run, slot)| {
            let found = run.start.max(keys.start)..run.end.min(keys.end);
            found.map(move |position| slot + position - run.start)
        })
    }

    /// Checks that pages, slots and positions agree.
    pub fn check(&self, page_size: usize) -> Result<(), String> {
        if self.first > self.end || self.start >= page_size {
            return Err(format!(
                "slots from {} of a page of {page_size}, keys {}..{}",
                self.start, self.first, self.end
            ));
        }
        if self.slots() == 0 && self.start != 0 {
            return Err("an empty region has a start".to_string());
        }
        let needed = self.filled().div_ceil(page_size);
        if needed != self.pages.len() {
            return Err(format!(
                "{} slots are in use of {} pages of {page_size}",
                self.filled(),
                self.pages.len()
            ));
        }
        let numbers = self.stretches.iter().map(|stretch| stretch.number);
        let is_ascending = numbers
            .clone()
            .zip(numbers.skip(1).chain([self.end]))
            .all(|(a, b)| a < b);
        let begins = self
            .stretches
            .front()
            .is_none_or(|front| front.number <= self.first)
            && self
                .stretches
                .get(1)
                .is_none_or(|next| next.number > self.first);
        if !is_ascending || !begins || self.stretches.is_empty() != (self.slots() == 0) {
            return Err("stretches of positions do not follow each other".to_string());
        }
        let mut previous = None;
        for run in self.runs() {
            if previous.is_some_and(|end| run.start < end) {
                return Err(format!(
                    "position {} is not after the one before",
                    run.start
                ));
            }
            previous = Some(run.end);
        }
        Ok(())
    }
}
