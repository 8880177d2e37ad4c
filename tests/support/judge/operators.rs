//! The dense form of block-sparse tensors, and their operators as loops in f64.

use crate::prelude::*;

/// Positions of the stored values in a dense `[batch, heads, seq_q, seq_kv]` tensor.
pub struct Form {
    pub layout: BlockLayout,
    pub batch: usize,
    /// `[batch, blocks, b, b]`
    pub shape: [usize; 4],
    /// Index in the dense tensor for each stored value; None if the pair is masked or the slot has no block.
    pub places: Vec<Option<usize>>,
}

impl Form {
    pub fn new(layout: &BlockLayout, batch: usize) -> Self {
        let b = layout.block_size();
        let [heads, seq_q, seq_kv] = [layout.heads(), layout.seq_q(), layout.seq_kv()];
        let of_entry = |entry: usize| {
            let mut places = Vec::new();
            for head in 0..heads {
                let allowed = layout.to_dense_batch(entry, head);
                let pattern = layout.pattern_of(entry, head);
                for q_block in 0..layout.q_blocks() {
                    for kept in layout.row(pattern, q_block) {
                        for (r, c) in (0..b * b).map(|bit| (bit / b, bit % b)) {
                            let (i, j) = (q_block * b + r, kept.block as usize * b + c);
                            let on = i < seq_q && j < seq_kv && allowed[i][j];
                            places.push(
                                on.then(|| ((entry * heads + head) * seq_q + i) * seq_kv + j),
                            );
                        }
                    }
                }
            }
            places
        };
        let mut entries: Vec<Vec<Option<usize>>> = (0..batch).map(of_entry).collect();
        let stored = entries.iter().map(Vec::len).max().unwrap();
        entries
            .iter_mut()
            .for_each(|places| places.resize(stored, None));
        Self {
            layout: layout.clone(),
            batch,
            shape: [batch, stored / (b * b), b, b],
            places: entries.concat(),
        }
    }

    pub fn dense_shape(&self) -> [usize; 4] {
        let layout = &self.layout;
        [self.batch, layout.heads(), layout.seq_q(), layout.seq_kv()]
    }

    /// Returns a random dense tensor that is 0 at masked pairs, and the mask of allowed pairs.
    pub fn random_dense(&self, seed: u64) -> (Vec<f64>, Vec<bool>) {
        let mut rng = seeded(seed);
        let count = self.dense_shape().iter().product();
        let (mut dense, mut allowed) = (vec![0.0; count], vec![false; count]);
        for place in self.places.iter().copied().flatten() {
            dense[place] = 2.0 * rng.random::<f64>() - 1.0;
            allowed[place] = true;
        }
        (dense, allowed)
    }

    /// Returns the stored form of a dense tensor. Masked pairs get the value `masked`, which must have no effect.
    pub fn stored(&self, dense: &[f64], masked: f64) -> Vec<f64> {
        let values = self.places.iter();
        values
            .map(|place| place.map_or(masked, |p| dense[p]))
            .collect()
    }
}

/// Dense products in f64 of `x` and `y`, `[batch, heads or kv_heads, rows, columns]`.
pub struct Dense {
    pub batch: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub seq_q: usize,
    pub seq_kv: usize,
    pub dim: usize,
}

impl Dense {
    pub fn q(&self, batch: usize, head: usize, i: usize) -> std::ops::Range<usize> {
        let row = (batch * self.heads + head) * self.seq_q + i;
        row * self.dim..(row + 1) * self.dim
    }

    pub fn kv(
        &self,
        kv_heads: usize,
        batch: usize,
        head: usize,
        j: usize,
    ) -> std::ops::Range<usize> {
        let row = (batch * kv_heads + head / (self.heads / kv_heads)) * self.seq_kv + j;
        row * self.dim..(row + 1) * self.dim
    }

    /// Calls `each` with batch, head, i, j and the index of the pair, for all pairs.
    pub fn pairs(&self, mut each: impl FnMut(usize, usize, usize, usize, usize)) {
        for place in 0..self.batch * self.heads * self.seq_q * self.seq_kv {
            let (row, j) = (place / self.seq_kv, place % self.seq_kv);
            let (head, i) = (row / self.seq_q, row % self.seq_q);
            each(head / self.heads, head % self.heads, i, j, place);
        }
    }

    /// Computes `a · bᵀ` at allowed pairs.
    pub fn nt(&self, a: &[f64], b: &[f64], allowed: &[bool], kv_heads: usize) -> Vec<f64> {
        let mut w = vec![0.0; allowed.len()];
        self.pairs(|batch, head, i, j, place| {
            if allowed[place] {
                let key = &b[self.kv(kv_heads, batch, head, j)];
                w[place] = dot(&a[self.q(batch, head, i)], key);
            }
        });
        w
    }

    pub fn nn(&self, w: &[f64], b: &[f64], kv_heads: usize) -> Vec<f64> {
        let mut out = vec![0.0; self.batch * self.heads * self.seq_q * self.dim];
        self.pairs(|batch, head, i, j, place| {
            if w[place] != 0.0 {
                let b = &b[self.kv(kv_heads, batch, head, j)];
                add(&mut out[self.q(batch, head, i)], w[place], b);
            }
        });
        out
    }

    pub fn tn(&self, w: &[f64], a: &[f64], kv_heads: usize) -> Vec<f64> {
        let mut out = vec![0.0; self.batch * kv_heads * self.seq_kv * self.dim];
        self.pairs(|batch, head, i, j, place| {
            if w[place] != 0.0 {
                let a = &a[self.q(batch, head, i)];
                add(&mut out[self.kv(kv_heads, batch, head, j)], w[place], a);
            }
        });
        out
    }

    /// Computes the softmax of `scale · w`, and the gradient `dS` from `dP`.
    pub fn softmax(&self, w: &[f64], dp: &[f64], allowed: &[bool], scale: f64) -> [Vec<f64>; 2] {
        let (mut p, mut ds) = (vec![0.0; w.len()], vec![0.0; w.len()]);
        for first in (0..w.len()).step_by(self.seq_kv) {
            let row: Vec<usize> = (first..first + self.seq_kv)
                .filter(|&place| allowed[place])
                .collect();
            let scores: Vec<f64> = row.iter().map(|&at| scale * w[at]).collect();
            for (&at, weight) in row.iter().zip(softmax(&scores)) {
                p[at] = weight;
            }
            let delta: f64 = row.iter().map(|&at| p[at] * dp[at]).sum();
            row.iter()
                .for_each(|&at| ds[at] = scale * p[at] * (dp[at] - delta));
        }
        [p, ds]
    }
}
