//! The transpose of a head pattern: the query blocks that attend to each column of key blocks.

use super::rows::{RowRuns, Run};

pub(crate) struct Columns {
    run_offsets: Vec<usize>,
    runs: Vec<Run>,
}

impl Columns {
    /// Transposes the rows in one sweep. Each column has at most one open run, and a block that continues it costs an addition. The sweep is O(blocks) in time
    /// and O(runs) in memory.
    pub fn transpose(rows: &RowRuns, q_blocks: usize, kv_blocks: usize) -> Self {
        let mut open: Vec<Option<Run>> = vec![None; kv_blocks];
        let mut closed: Vec<(u32, Run)> = Vec::new();
        for q_block in 0..q_blocks as u32 {
            for run in rows.row(q_block as usize) {
                for column in run.blocks() {
                    let slot = &mut open[column as usize];
                    match slot {
                        Some(current) if continues(current, q_block, run.mask) => {
                            current.stride = q_block - current.last();
                            current.count += 1;
                        }
                        _ => {
                            let fresh = Run::one(q_block, run.mask);
                            if let Some(done) = slot.replace(fresh) {
                                closed.push((column, done));
                            }
                        }
                    }
                }
            }
        }
        for (column, run) in open.into_iter().enumerate() {
            closed.extend(run.map(|run| (column as u32, run)));
        }
        // The sort is stable: runs of a column stay in the order of their rows.
        closed.sort_by_key(|(column, _)| *column);
        let mut run_offsets = vec![0; kv_blocks + 1];
        for (column, _) in &closed {
            run_offsets[*column as usize + 1] += 1;
        }
        for column in 0..kv_blocks {
            run_offsets[column + 1] += run_offsets[column];
        }
        Self {
            run_offsets,
            runs: closed.into_iter().map(|(_, run)| run).collect(),
        }
    }

    pub fn runs(&self, kv_block: usize) -> &[Run] {
        &self.runs[self.run_offsets[kv_block]..self.run_offsets[kv_block + 1]]
    }
}

fn continues(run: &Run, block: u32, mask: u32) -> bool {
    run.mask == mask && (run.count == 1 || block - run.last() == run.stride)
}
