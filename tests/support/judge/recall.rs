//! Full attention in f64, and how much of it a choice keeps.

use burn_sparse_select::{
    Always, Budget, EstimateGrid, EstimateKind, ReferenceInputs, Rule, ScoreGrid,
};

/// Queries and keys of one batch entry.
pub struct Dense {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq: usize,
    pub head_dim: usize,
    pub scale: f64,
}

impl Dense {
    /// The causal call.
    pub fn call(&self) -> ReferenceInputs<'_> {
        ReferenceInputs {
            q: &self.q,
            k: &self.k,
            heads: self.heads,
            kv_heads: self.kv_heads,
            seq_q: self.seq,
            seq_kv: self.seq,
            head_dim: self.head_dim,
            scale: self.scale,
            causal: true,
        }
    }

    /// Attention of a head's queries from the first one given, as `[queries][keys]`.
    pub fn attention(&self, head: usize, first: usize) -> Attention {
        let call = self.call();
        let rows = (first..self.seq).map(|i| {
            let q = call.query(head, i);
            let mut row: Vec<f64> = (0..=i)
                .map(|j| {
                    let k = call.key(head, j);
                    let mut sum = 0.0;
                    for c in 0..self.head_dim {
                        sum += q[c] * k[c];
                    }
                    sum * self.scale
                })
                .collect();
            let largest = row.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
            row.iter_mut().for_each(|x| *x = (*x - largest).exp());
            let sum: f64 = row.iter().sum();
            row.iter_mut().for_each(|x| *x /= sum);
            row
        });
        Attention {
            first,
            rows: rows.collect(),
        }
    }
}

/// Blocks of so many queries and keys of a causal call.
pub fn square_grid(block: usize, seq: usize) -> ScoreGrid {
    EstimateGrid::square(block).of([seq; 2], true)
}

/// Attention of queries from the first one on: a query has as many numbers as it sees keys.
pub struct Attention {
    pub first: usize,
    pub rows: Vec<Vec<f64>>,
}

impl Attention {
    /// The mean over the queries of what they give the pairs that are kept, and which share of all pairs those are.
    pub fn recall(&self, is_kept: impl Fn(usize, usize) -> bool) -> [f64; 2] {
        let (mut recall, mut pairs, mut all) = (0.0, 0, 0);
        for (row, p) in self.rows.iter().enumerate() {
            for (j, p) in p.iter().enumerate() {
                if is_kept(self.first + row, j) {
                    recall += p;
                    pairs += 1;
                }
                all += 1;
            }
        }
        let queries = self.rows.len() as f64;
        [recall / queries, f64::from(pairs) / f64::from(all)]
    }

    /// [`recall`](Self::recall) of blocks, `[rows][blocks]`.
    pub fn recall_of_blocks(&self, kept: &[Vec<bool>], block: usize) -> [f64; 2] {
        self.recall(|i, j| kept[i / block][j / block])
    }

    /// What blocks of queries give blocks of keys, `[rows][blocks]`; nothing of queries before the first.
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

/// What a rule keeps of `[rows][blocks]` scores.
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

/// The places that are true.
pub fn places(kept: &[bool]) -> Vec<usize> {
    (0..kept.len()).filter(|&at| kept[at]).collect()
}
