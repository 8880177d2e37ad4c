//! Sums over diagonals: of blocks, of positions, and the gradient of the biases of distances.

use super::gather::Problem;
use crate::base::prelude::*;

/// Sums over the diagonals of blocks `[blocks, b · b]`: element `b − 1 + r − c` of `[blocks, 2 · b − 1]`.
///
/// With its columns turned round and padded to `2 · b`, a block read in rows of `2 · b − 1` has each of its rows one place further to the right than the
/// one above: diagonals are columns.
pub(super) fn diagonals_of<B: Backend>(blocks: Array<B>, b: usize) -> Array<B> {
    let count = blocks.shape()[0];
    let turned = blocks.reshape([count, b, b]).flip(2);
    let zeros = Array::zeros(turned.shape(), &turned.0.device(), turned.dtype());
    let wide = Array::cat([turned, zeros], 2).reshape([count, 2 * b * b]);
    let skewed = wide.narrow(1, 0..b * (2 * b - 1));
    let sums = skewed.reshape([count, b, 2 * b - 1]).sum_dim(1);
    sums.reshape([count, 2 * b - 1])
}

impl<B: Backend> Problem<'_, B> {
    /// Diagonals of blocks over all heads.
    pub fn num_diagonals(&self) -> usize {
        self.batch * self.heads * (self.q_blocks + self.kv_blocks - 1)
    }

    /// Diagonals of blocks `[batch · heads · lines, 2 · b − 1]` to `[batch, heads, seq_q + seq_kv − 1]`: a diagonal of positions crosses two of them.
    pub fn untile_diagonals(&self, diagonals: Array<B>) -> Array<B> {
        let (rows, b) = (self.batch * self.heads, self.b);
        let lines = self.num_diagonals() / rows;
        let diagonals = diagonals.reshape([rows, lines, 2 * b - 1]);
        let part = |columns| diagonals.clone().narrow(2, columns);
        let own = Array::cat([part(0..b), self.zeros([rows, 1, b])], 1);
        let behind = Array::cat([part(b..2 * b - 1), self.zeros([rows, lines, 1])], 2);
        let behind = Array::cat([self.zeros([rows, 1, b]), behind], 1);
        let sums = (behind + own).reshape([self.batch, self.heads, (lines + 1) * b]);
        let first = self.seq_kv.next_multiple_of(b) - self.seq_kv;
        sums.narrow(2, first..first + self.seq_q + self.seq_kv - 1)
    }

    /// Diagonals of blocks as the gradient of the biases of distances.
    pub fn distances_of(&self, diagonals: Array<B>) -> Array<B> {
        let [heads, width] = self.relative;
        let reach = width / 2;
        let mut sums = self.untile_diagonals(diagonals).sum_dim(0);
        if heads == 1 {
            sums = sums.sum_dim(1);
        }
        let length = self.seq_q + self.seq_kv - 1;
        // Element x is of `key − query = seq_q − 1 − x`: turned round, of `x + 1 − seq_kv`.
        let sums = sums.reshape([heads, length]).flip(1);
        // As many distances as the table has, or more, on each side.
        let zeros = |missing: usize| (missing > 0).then(|| self.zeros([heads, missing]));
        let [before, behind] = [self.seq_kv, self.seq_q].map(|side| reach.saturating_sub(side - 1));
        let parts = [zeros(before), Some(sums), zeros(behind)];
        let sums = Array::cat(parts.into_iter().flatten(), 1);
        if reach == 0 {
            return sums.sum_dim(1);
        }
        let length = length + before + behind;
        // Distances beyond the reach belong to the outermost.
        let first = self.seq_kv - 1 + before - reach;
        let last = first + width - 1;
        let part = |columns| sums.clone().narrow(1, columns);
        let outermost = [part(0..first + 1), part(last..length)].map(|part| part.sum_dim(1));
        let [lowest, highest] = outermost;
        Array::cat([lowest, part(first + 1..last), highest], 1)
    }
}
