//! Full attention in f64, and the recall of a selection.

use burn_sparse_select::{Always, Budget, EstimateGrid, EstimateKind, Rule, ScoreGrid};

use crate::judge::estimate::Estimate;
use crate::prelude::{dot, softmax};

impl Estimate {
    /// Returns the attention of a head's queries from `first` on, as `[queries][keys]`.
    pub fn attention(&self, head: usize, first: usize) -> Attention {
        let call = self.entry(0);
        let row = |i: usize| {
            let score = |j| dot(call.query(head, i), call.key(head, j)) * self.scale;
            softmax(&(0..=i).map(score).collect::<Vec<_>>())
        };
        Attention {
            first,
            rows: (first..self.sizes.seq_q).map(row).collect(),
        }
    }
}

/// Makes the grid of a causal call with blocks of `block` queries and keys.
pub fn square_grid(block: usize, seq: usize) -> ScoreGrid {
    EstimateGrid::square(block).of([seq; 2], true)
}

/// Attention of queries from the first one on; a row has an element for each key that the query sees.
pub struct Attention {
    pub first: usize,
    pub rows: Vec<Vec<f64>>,
}

impl Attention {
    /// Returns the mean over the queries of their attention to kept pairs.
    pub fn recall(&self, is_kept: impl Fn(usize, usize) -> bool) -> f64 {
        let of_row = |(row, p): (usize, &Vec<f64>)| -> f64 {
            let kept = (0..p.len()).filter(|&j| is_kept(self.first + row, j));
            kept.map(|j| p[j]).sum()
        };
        let recall: f64 = self.rows.iter().enumerate().map(of_row).sum();
        recall / self.rows.len() as f64
    }

    /// Returns the [`recall`](Self::recall) of blocks, `[rows][blocks]`.
    pub fn recall_of_blocks(&self, kept: &[Vec<bool>], block: usize) -> f64 {
        self.recall(|i, j| kept[i / block][j / block])
    }

    /// Returns the attention of query blocks to key blocks, `[rows][blocks]`; 0 for queries before the first.
    pub fn attention_sums(&self, grid: &ScoreGrid) -> Vec<f64> {
        let mut attention_sums = vec![0.0; grid.rows() * grid.blocks()];
        for (row, p) in self.rows.iter().enumerate() {
            let first = (self.first + row) / grid.query_rows * grid.blocks();
            for (j, p) in p.iter().enumerate() {
                attention_sums[first + j / grid.block] += p;
            }
        }
        attention_sums
    }
}

/// Returns the blocks that a rule keeps by `[rows][blocks]` scores.
pub fn kept(
    grid: &ScoreGrid,
    scores: &[f64],
    kind: EstimateKind,
    keep: Budget,
    [first, local]: [usize; 2],
) -> Vec<Vec<bool>> {
    let forced = Always { first, local };
    let rule = Rule { kind, keep, forced };
    let rows = scores.chunks(grid.blocks()).enumerate();
    rows.map(|(row, scores)| rule.selects(grid, row, scores))
        .collect()
}

/// Returns the indices of true elements.
pub fn places(kept: &[bool]) -> Vec<usize> {
    (0..kept.len()).filter(|&at| kept[at]).collect()
}
