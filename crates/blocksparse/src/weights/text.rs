//! Prints a weight layout: one line, or with `{:#}` a picture with one character per cell of one block or several.

use std::fmt;

use super::WeightLayout;
use crate::layout::text::{MAX_CELLS, shade};

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}({}×{} blocks of {}, {:.1} %",
            self.name(),
            self.in_blocks(),
            self.out_blocks(),
            self.block(),
            100.0 * self.density()
        )?;
        if let Some(seed) = self.seed() {
            write!(f, ", seed {seed}")?;
        }
        write!(f, ")")?;
        if f.alternate() {
            let blocks = self.in_blocks().max(self.out_blocks());
            for row in self.shades(blocks.div_ceil(MAX_CELLS)) {
                let line: String = row.into_iter().map(shade).collect();
                write!(f, "\n{line}")?;
            }
        }
        Ok(())
    }
}

impl WeightLayout {
    /// Returns the kept share of each cell of `cell × cell` blocks: inputs downwards, outputs to the right.
    pub(crate) fn shades(&self, cell: usize) -> Vec<Vec<f64>> {
        let (rows, columns) = (self.in_blocks(), self.out_blocks());
        let mut counts = vec![vec![0usize; columns.div_ceil(cell)]; rows.div_ceil(cell)];
        for (input, output) in self.kept_blocks() {
            counts[input as usize / cell][output as usize / cell] += 1;
        }
        let size = |at: usize, blocks: usize| (blocks - at * cell).min(cell);
        let share = |row: usize, (column, count): (usize, usize)| {
            count as f64 / (size(row, rows) * size(column, columns)) as f64
        };
        (counts.into_iter().enumerate())
            .map(|(row, counts)| {
                (counts.into_iter().enumerate().map(|cell| share(row, cell))).collect()
            })
            .collect()
    }
}
