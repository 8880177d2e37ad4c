//! The kept blocks of a head pattern as runs of equally spaced blocks with one mask.

use serde::{Deserialize, Serialize};

/// Blocks `start, start + stride, …`, `count` of them, that share one mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// First block of the run.
    pub start: u32,
    /// Distance between two blocks.
    pub stride: u32,
    /// Number of blocks.
    pub count: u32,
    /// Mask of all blocks: [`FULL`](crate::FULL), or an index into [`BlockLayout::masks`](crate::BlockLayout::masks).
    pub mask: u32,
}

impl Run {
    pub(crate) fn one(start: u32, mask: u32) -> Self {
        Self {
            start,
            stride: 1,
            count: 1,
            mask,
        }
    }

    /// Returns the run's blocks in order.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = u32> + use<> {
        let Self { start, stride, .. } = *self;
        (0..self.count).map(move |k| start + k * stride)
    }

    pub(crate) fn last(&self) -> u32 {
        self.start + (self.count - 1) * self.stride
    }
}

/// One kept block of a row or of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Key block of a row's entry, or query block of a column's entry.
    pub block: u32,
    /// Mask of the block: [`FULL`](crate::FULL), or an index into [`BlockLayout::masks`](crate::BlockLayout::masks).
    pub mask: u32,
}

/// Expands `runs` into entries in ascending order.
pub(crate) fn entries(runs: &[Run]) -> Vec<Entry> {
    let mut entries: Vec<Entry> = runs
        .iter()
        .flat_map(|run| {
            let mask = run.mask;
            run.blocks().map(move |block| Entry { block, mask })
        })
        .collect();
    if runs.windows(2).any(|w| w[1].start <= w[0].last()) {
        entries.sort_unstable();
    }
    entries
}

/// The rows of one distinct head pattern, shared by all heads that use it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RowRuns {
    /// Runs of block row `I`: `runs[run_offsets[I]..run_offsets[I + 1]]`.
    pub run_offsets: Vec<usize>,
    pub runs: Vec<Run>,
}

impl RowRuns {
    pub fn new() -> Self {
        Self {
            run_offsets: vec![0],
            runs: Vec::new(),
        }
    }

    /// Returns `q_blocks` rows without blocks.
    pub fn empty(q_blocks: usize) -> Self {
        Self {
            run_offsets: vec![0; q_blocks + 1],
            runs: Vec::new(),
        }
    }

    /// Appends a run to the row under construction, merged with the previous run if they are adjacent.
    pub fn push(&mut self, run: Run) {
        let row_start = *self.run_offsets.last().expect("starts with 0");
        if let [.., last] = &mut self.runs[row_start..]
            && last.mask == run.mask
            && (last.stride == 1 || last.count == 1)
            && (run.stride == 1 || run.count == 1)
            && run.start == last.start + last.count
        {
            last.count += run.count;
            last.stride = 1;
            return;
        }
        self.runs.push(run);
    }

    pub fn row(&self, q_block: usize) -> &[Run] {
        &self.runs[self.run_offsets[q_block]..self.run_offsets[q_block + 1]]
    }

    pub fn end_row(&mut self) {
        self.run_offsets.push(self.runs.len());
    }
}
