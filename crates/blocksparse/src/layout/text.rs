//! Prints a layout as text: one character per cell of one block or several.

use std::fmt;

use super::BlockLayout;

/// Maximum number of cells per side.
pub(crate) const MAX_CELLS: usize = 64;

/// Characters for the computed share of a cell's pairs, from none to all.
const SHADES: [char; 6] = ['.', '-', '=', '+', '*', '#'];

impl fmt::Display for BlockLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {}, {} × {} positions in blocks of {}",
            self.name(),
            self.counted_heads(),
            self.seq_q(),
            self.seq_kv(),
            self.block_size(),
        )?;
        writeln!(
            f,
            "{} blocks kept ({:.2}% of all), {:.2}% of the pairs computed",
            self.blocks(),
            100.0 * self.block_density(),
            100.0 * self.density(),
        )?;
        let blocks = self.q_blocks().max(self.kv_blocks());
        let cell = self.block_size() * blocks.div_ceil(MAX_CELLS);
        for pattern in 0..self.num_patterns() {
            if self.num_patterns() > 1 {
                writeln!(f, "{}:", self.users(pattern))?;
            }
            for row in self.shades(pattern, cell) {
                let line: String = row.into_iter().map(shade).collect();
                writeln!(f, "{line}")?;
            }
        }
        Ok(())
    }
}

pub(crate) fn shade(fraction: f64) -> char {
    let last = SHADES.len() - 1;
    match fraction {
        0.0 => SHADES[0],
        1.0 => SHADES[last],
        partial => SHADES[1 + (partial * (last - 1) as f64) as usize],
    }
}

impl BlockLayout {
    /// Returns "1 head", "8 heads".
    pub(crate) fn counted_heads(&self) -> String {
        match self.heads() {
            1 => "1 head".into(),
            heads => format!("{heads} heads"),
        }
    }

    /// Returns the heads that use a pattern: "heads 0, 2, 4", or for a stacked layout "entry 0: head 1; entry 1: head 1".
    #[doc(hidden)]
    pub fn users(&self, pattern: usize) -> String {
        let in_entry = |entry: usize| {
            let heads: Vec<String> = (0..self.heads())
                .filter(|&head| self.pattern_of(entry, head) == pattern)
                .map(|head| head.to_string())
                .collect();
            match heads.len() {
                0 => None,
                1 => Some(format!("head {}", heads[0])),
                _ => Some(format!("heads {}", heads.join(", "))),
            }
        };
        let Some(batch) = self.batch() else {
            return in_entry(0).unwrap_or_default();
        };
        let entries: Vec<String> = (0..batch)
            .filter_map(|entry| Some(format!("entry {entry}: {}", in_entry(entry)?)))
            .collect();
        entries.join("; ")
    }

    /// Returns the computed share of the pairs of each cell of `cell × cell` positions. `cell` is a multiple or a divisor of the
    /// block size.
    #[doc(hidden)]
    pub fn shades(&self, pattern: usize, cell: usize) -> Vec<Vec<f64>> {
        let b = self.block_size();
        let (rows, columns) = (self.seq_q().div_ceil(cell), self.seq_kv().div_ceil(cell));
        let mut counts = vec![vec![0u64; columns]; rows];
        let in_mask: Vec<u64> = self.masks().iter().map(|mask| mask.count()).collect();
        for q_block in 0..self.q_blocks() {
            for run in self.row_runs(pattern, q_block) {
                for kv_block in run.blocks() {
                    let (i0, j0) = (q_block * b, kv_block as usize * b);
                    if cell >= b {
                        counts[i0 / cell][j0 / cell] += in_mask[run.mask as usize];
                        continue;
                    }
                    let mask = &self.masks()[run.mask as usize];
                    for (r, c) in (0..b).flat_map(|r| (0..b).map(move |c| (r, c))) {
                        if mask.get(r, c) {
                            counts[(i0 + r) / cell][(j0 + c) / cell] += 1;
                        }
                    }
                }
            }
        }
        let size = |index: usize, seq: usize| (seq - index * cell).min(cell) as f64;
        (counts.into_iter().enumerate())
            .map(|(i, row)| {
                (row.into_iter().enumerate())
                    .map(|(j, n)| n as f64 / (size(i, self.seq_q()) * size(j, self.seq_kv())))
                    .collect()
            })
            .collect()
    }
}
