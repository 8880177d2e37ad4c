//! The kept blocks of a head pattern, as runs of equal blocks.

use serde::{Deserialize, Serialize};

/// Blocks `start, start + stride, …`, `count` of them, that share one mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Run {
    /// First block.
    pub start: u32,
    /// Distance between two blocks.
    pub stride: u32,
    /// Number of blocks.
    pub count: u32,
    /// Their mask: [`FULL`](crate::FULL), or an index into [`BlockLayout::masks`](crate::BlockLayout::masks).
    pub mask: u32,
}

impl Run {
    /// One block.
    pub(crate) fn one(start: u32, mask: u32) -> Self {
        Self {
            start,
            stride: 1,
            count: 1,
            mask,
        }
    }

    /// The run's blocks, in order.
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
    /// The key block of a row's entry; the query block of a column's.
    pub block: u32,
    /// [`FULL`](crate::FULL), or an index into [`BlockLayout::masks`](crate::BlockLayout::masks).
    pub mask: u32,
}

/// The blocks of `runs`, ascending.
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

/// The rows of one distinct head pattern: what the heads that look alike share.
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

    /// `q_blocks` rows without blocks.
    pub fn empty(q_blocks: usize) -> Self {
        Self {
            run_offsets: vec![0; q_blocks + 1],
            runs: Vec::new(),
        }
    }

    /// Adds a run to the row being built, joined to the previous one where they touch.
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

    /// The runs of a row.
    pub fn row(&self, q_block: usize) -> &[Run] {
        &self.runs[self.run_offsets[q_block]..self.run_offsets[q_block + 1]]
    }

    pub fn end_row(&mut self) {
        self.run_offsets.push(self.runs.len());
    }
}
