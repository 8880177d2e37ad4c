//! Rows of a layout with their key blocks moved to other positions.

use std::collections::HashMap;
use std::ops::Range;

use super::BlockLayout;
use super::builder::LayoutBuilder;
use super::mask::MaskInterner;
use super::rows::{RowRuns, Run};
use super::shape::LayoutShape;

/// Position of a key block that is not part of the target.
pub(crate) const NOWHERE: u32 = u32::MAX;

impl BlockLayout {
    /// Returns the block rows `rows`, in order, with key block `j` moved to block `places[which(head)][j]` of `kv_blocks`.
    ///
    /// All batch entries are equal. Every block that a row attends to must have a position.
    pub(crate) fn at_places(
        &self,
        name: String,
        rows: &[Range<usize>],
        kv_blocks: usize,
        places: &[Vec<u32>],
        which: impl Fn(usize) -> usize,
    ) -> Self {
        let b = self.block_size();
        let mut builder = LayoutBuilder::new(MaskInterner::of(self.masks().to_vec()));
        let mut known: HashMap<(usize, usize), u32> = HashMap::new();
        for head in 0..self.heads() {
            let key = (self.pattern_of(0, head), which(head));
            let pattern = *known.entry(key).or_insert_with(|| {
                let mut moved = RowRuns::new();
                for row in rows.iter().cloned().flatten() {
                    let mut runs: Vec<Run> = (self.row_runs(key.0, row).iter())
                        .flat_map(|run| moved_runs(run, &places[key.1]))
                        .collect();
                    runs.sort_unstable_by_key(|run| run.start);
                    runs.into_iter().for_each(|run| moved.push(run));
                    moved.end_row();
                }
                builder.pattern(moved)
            });
            builder.head_patterns.push(pattern);
        }
        let seq_q = b * rows.iter().map(Range::len).sum::<usize>();
        let shape = LayoutShape::new(self.heads(), [seq_q, b * kv_blocks], b);
        builder.finish(name, shape, None)
    }
}

/// Moves the blocks of a run and returns them as few runs.
fn moved_runs(run: &Run, places: &[u32]) -> Vec<Run> {
    let mut moved: Vec<Run> = Vec::new();
    for block in run.blocks() {
        let start = places[block as usize];
        debug_assert_ne!(start, NOWHERE, "block {block} has no place");
        match moved.last_mut() {
            Some(last) if last.count == 1 && start > last.start => {
                (last.stride, last.count) = (start - last.start, 2);
            }
            Some(last) if start == last.last() + last.stride => last.count += 1,
            _ => moved.push(Run::one(start, run.mask)),
        }
    }
    moved
}
