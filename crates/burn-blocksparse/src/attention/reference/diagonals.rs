//! Sums over diagonals of blocks and of positions, and the gradient of the relative bias.

use super::gather::Problem;
use crate::base::prelude::*;

/// Sums the diagonals of blocks `[blocks, b · b]`: diagonal `r − c` goes to element `b − 1 + r − c` of `[blocks, 2 · b − 1]`.
///
/// The columns of a block are reversed and padded to `2 · b`. Read in rows of `2 · b − 1`, each row of the block is then shifted right by one relative to the
/// row above, so diagonals become columns.
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
    /// Returns the number of diagonals of blocks over all heads.
    pub fn num_diagonals(&self) -> usize {
        self.batch * self.heads * (self.q_blocks + self.kv_blocks - 1)
    }

    /// Converts sums per diagonal of blocks, `[batch · heads · lines, 2 · b − 1]`, to `[batch, heads, seq_q + seq_kv − 1]`. A diagonal of positions crosses two
    /// diagonals of blocks.
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

    /// Converts sums per diagonal of blocks to the gradient of the relative bias.
    pub fn distances_of(&self, diagonals: Array<B>) -> Array<B> {
        let [heads, width] = self.relative;
        let reach = width / 2;
        let mut sums = self.untile_diagonals(diagonals).sum_dim(0);
        if heads == 1 {
            sums = sums.sum_dim(1);
        }
        let length = self.seq_q + self.seq_kv - 1;
        // Element x belongs to `key − query = seq_q − 1 − x`; reversed, to `x + 1 − seq_kv`.
        let sums = sums.reshape([heads, length]).flip(1);
        // Pads each side to at least the distances of the table.
        let zeros = |missing: usize| (missing > 0).then(|| self.zeros([heads, missing]));
        let [before, behind] = [self.seq_kv, self.seq_q].map(|side| reach.saturating_sub(side - 1));
        let parts = [zeros(before), Some(sums), zeros(behind)];
        let sums = Array::cat(parts.into_iter().flatten(), 1);
        if reach == 0 {
            return sums.sum_dim(1);
        }
        let length = length + before + behind;
        // Distances beyond the reach are added to the outermost entries.
        let first = self.seq_kv - 1 + before - reach;
        let last = first + width - 1;
        let part = |columns| sums.clone().narrow(1, columns);
        let outermost = [part(0..first + 1), part(last..length)].map(|part| part.sum_dim(1));
        let [lowest, highest] = outermost;
        Array::cat([lowest, part(first + 1..last), highest], 1)
    }
}
