//! The order in which tiles add to shared sums.

use super::tiling::{LAST_VISIT, NO_VISIT};

/// Sizes of a plan that [`count_visits`] needs.
pub(super) struct PlanSizes {
    /// Number of tiles per head.
    pub tiles: usize,
    /// Number of entries per step.
    pub per_step: usize,
    /// Number of words per entry.
    pub entry_words: usize,
    /// Number of groups of columns.
    pub others: usize,
    /// True if long tiles count visits separately.
    pub apart: bool,
}

/// Maximum number of steps of usual tiles next to which a long tile adds to separate sums, or without those runs in the other direction.
///
/// For tiles of 6 and 10 steps next to one of 128 steps, the backward pass is 19% and 13% faster if only the long one runs in the other direction (windows of
/// 256 and 512 with global tokens). For tiles of 66 steps next to one of 1,024 it is 8% slower (streaming(4096, 64)). Measured on an H100.
const SHORT: usize = 32;

/// Returns the number of first tiles that are so much longer than the others that these would wait for them. `ranked` holds the steps of each tile summed over
/// all `patterns`, in descending order.
pub(super) fn long_tiles(ranked: impl ExactSizeIterator<Item = usize>, patterns: usize) -> usize {
    let steps: Vec<usize> = ranked.collect();
    let Some(&usual) = steps.get(steps.len() / 16) else {
        return 0;
    };
    match usual <= SHORT * patterns {
        true => steps.iter().take_while(|&&steps| steps > 4 * usual).count(),
        false => 0,
    }
}

/// Returns whether [`long_tiles`] may find any, for tiles with a mean of at least `least` steps and a maximum of `most`.
pub(super) fn may_be_short(least: f64, most: usize) -> bool {
    least <= (SHORT + most.div_ceil(16)) as f64
}

/// Result of [`count_visits`].
#[derive(Default)]
pub(super) struct Visits {
    /// One order of tiles for all patterns, those with most steps first.
    pub order: Vec<u32>,
    /// Number of first tiles that count visits separately.
    pub apart: usize,
    /// See [`TilePlan::between`](super::TilePlan::between).
    pub between: usize,
    /// See [`TilePlan::complete`](super::TilePlan::complete).
    pub complete: bool,
}

/// Orders the tiles and stores the visits of all entries.
pub(super) fn count_visits(records: &[u32], entries: &mut [u32], sizes: PlanSizes) -> Visits {
    let PlanSizes {
        tiles,
        per_step,
        entry_words,
        others,
        apart,
    } = sizes;
    let steps = |record: usize| records[record * 3 + 1] as usize;
    let patterns = records.len() / 3 / tiles.max(1);
    let total = |tile: usize| -> usize { (0..patterns).map(|p| steps(p * tiles + tile)).sum() };
    let mut ranked: Vec<u32> = (0..tiles as u32).collect();
    ranked.sort_by_key(|&tile| std::cmp::Reverse(total(tile as usize)));
    let apart = match apart {
        true => long_tiles(ranked.iter().map(|&tile| total(tile as usize)), patterns),
        false => 0,
    };
    let mut sharing = Sharing::new(others);
    let mut complete = apart == 0;
    for pattern in 0..patterns {
        let record = |rank: usize| pattern * tiles + ranked[rank] as usize;
        // Tiles run from their last queries to their first, so that neighbours, which start at the same time, do not need the same queries at
        // once. A tile that most queries see, such as that of attention sinks, is far from done with its last queries when the others finish. It
        // runs in the other direction and stays ahead of all others, which wait for its visits, unless it has separate sums. Where the others are
        // long too, they would wait too long at their start, so all tiles run in the other direction, one step apart.
        let usual = (tiles > 0).then(|| steps(record(tiles / 16)));
        let is_long = |record: usize| usual.is_some_and(|usual| steps(record) > 4 * usual);
        let all = (tiles > 0).then(|| record(0)).is_some_and(is_long)
            && usual.is_some_and(|usual| usual > SHORT);
        let mut visits = vec![0u32; others];
        // The word of the last entry of each group so far.
        let mut last = vec![None; others];
        sharing.begin();
        for rank in 0..tiles {
            if rank == apart {
                visits.fill(0);
            }
            let record = record(rank);
            let first = records[record * 3] as usize * entry_words;
            let length = steps(record) * per_step * entry_words;
            let words = &mut entries[first..first + length];
            if all || (apart == 0 && is_long(record)) {
                reverse_steps(words, per_step * entry_words);
            }
            sharing.add(steps(record), words.chunks_exact(entry_words));
            for (k, entry) in words.chunks_exact_mut(entry_words).enumerate() {
                if entry[2] & NO_VISIT != NO_VISIT {
                    let group = entry[0] as usize;
                    entry[2] |= visits[group];
                    visits[group] += 1;
                    last[group] = Some(first + k * entry_words);
                }
            }
        }
        if apart == 0 {
            last.iter()
                .flatten()
                .for_each(|&at| entries[at + 2] |= LAST_VISIT);
            complete &= last.iter().all(Option::is_some);
        }
    }
    let even = apart == 0
        && are_even(ranked.iter().map(|&tile| total(tile as usize)), patterns)
        && sharing.waiting * 16 <= tiles * patterns;
    Visits {
        between: if even { sharing.between() } else { 0 },
        order: (std::iter::repeat_n(ranked, patterns).flatten()).collect(),
        apart,
        complete,
    }
}

/// Returns whether a tile has much fewer steps than others for which it waits.
fn are_much_fewer(steps: usize, others: usize) -> bool {
    4 * steps + 8 < others
}

/// Returns whether no tile has much fewer steps than the preceding one. `ranked` holds the steps of each tile summed over all `patterns`, in descending order.
/// A short tile waits for the long ones before it if these started only recently.
fn are_even(ranked: impl Iterator<Item = usize> + Clone, patterns: usize) -> bool {
    let behind = ranked.clone().skip(1);
    !(ranked.zip(behind)).any(|(before, steps)| are_much_fewer(steps / patterns, before / patterns))
}

/// Measures how far apart, in launch order, tiles of a pattern are that share groups of columns.
struct Sharing {
    /// For each group, 1 plus the rank of the last tile with it, or 0.
    last: Vec<usize>,
    /// Number of steps of the tiles so far, by rank.
    steps: Vec<usize>,
    /// Sum of the distances of tiles that share a group with an earlier tile, weighted by their entries.
    distances: usize,
    entries: usize,
    /// Number of tiles with much fewer steps than the latest tile with which they share groups.
    waiting: usize,
}

impl Sharing {
    fn new(groups: usize) -> Self {
        Self {
            last: vec![0; groups],
            steps: Vec::new(),
            distances: 0,
            entries: 0,
            waiting: 0,
        }
    }

    fn add<'a>(&mut self, steps: usize, entries: impl ExactSizeIterator<Item = &'a [u32]>) {
        let (rank, count) = (self.steps.len(), entries.len());
        let mut latest = 0;
        for entry in entries.filter(|entry| entry[2] & NO_VISIT != NO_VISIT) {
            let last = &mut self.last[entry[0] as usize];
            latest = latest.max(*last);
            *last = rank + 1;
        }
        if latest > 0 {
            self.distances += (rank + 1 - latest) * count;
            self.entries += count;
            self.waiting += usize::from(are_much_fewer(steps, self.steps[latest - 1]));
        }
        self.steps.push(steps);
    }

    /// Starts with the tiles of another pattern.
    fn begin(&mut self) {
        self.last.fill(0);
        self.steps.clear();
    }

    /// Returns the mean distance, at least 1.
    fn between(&self) -> usize {
        match self.entries {
            0 => 1,
            entries => (self.distances + entries / 2) / entries,
        }
    }
}

fn reverse_steps(words: &mut [u32], step: usize) {
    let steps = words.len() / step;
    for low in 0..steps / 2 {
        let (front, back) = words.split_at_mut((steps - 1 - low) * step);
        front[low * step..(low + 1) * step].swap_with_slice(&mut back[..step]);
    }
}
