//! Sums over diagonals: of blocks, of positions, and the gradient of the biases of distances.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::gather::Problem;

/// Sums over the diagonals of blocks `[blocks, b · b]`: element `b − 1 + r − c` of `[blocks, 2 · b − 1]`.
///
/// With its columns turned round and padded to `2 · b`, a block read in rows of `2 · b − 1` has each of its rows one place further to the right than the
/// one above: diagonals are columns.
pub(super) fn diagonals_of<B: Backend>(blocks: FloatTensor<B>, b: usize) -> FloatTensor<B> {
    let count = blocks.shape()[0];
    let turned = B::float_flip(B::float_reshape(blocks, Shape::new([count, b, b])), &[2]);
    let zeros = B::float_zeros(turned.shape(), &turned.device(), turned.dtype().into());
    let wide = B::float_reshape(
        B::float_cat(vec![turned, zeros], 2),
        Shape::new([count, 2 * b * b]),
    );
    let skewed = B::float_slice(wide, &[Slice::full(), Slice::from(0..b * (2 * b - 1))]);
    let skewed = B::float_reshape(skewed, Shape::new([count, b, 2 * b - 1]));
    B::float_reshape(B::float_sum_dim(skewed, 1), Shape::new([count, 2 * b - 1]))
}

impl<B: Backend> Problem<'_, B> {
    /// Diagonals of blocks over all heads.
    pub fn num_diagonals(&self) -> usize {
        self.batch * self.heads * (self.q_blocks + self.kv_blocks - 1)
    }

    /// Diagonals of blocks `[batch · heads · lines, 2 · b − 1]` to `[batch, heads, seq_q + seq_kv − 1]`: a diagonal of positions crosses two of them.
    pub fn untile_diagonals(&self, diagonals: FloatTensor<B>) -> FloatTensor<B> {
        let (rows, b) = (self.batch * self.heads, self.b);
        let lines = self.num_diagonals() / rows;
        let zeros = |shape: [usize; 3]| B::float_zeros(Shape::new(shape), &self.device, self.dtype);
        let diagonals = B::float_reshape(diagonals, Shape::new([rows, lines, 2 * b - 1]));
        let part = |from, to| {
            let columns = Slice::from(from..to);
            B::float_slice(diagonals.clone(), &[Slice::full(), Slice::full(), columns])
        };
        let own = B::float_cat(vec![part(0, b), zeros([rows, 1, b])], 1);
        let behind = B::float_cat(vec![part(b, 2 * b - 1), zeros([rows, lines, 1])], 2);
        let behind = B::float_cat(vec![zeros([rows, 1, b]), behind], 1);
        let sums = B::float_reshape(
            B::float_add(behind, own),
            Shape::new([self.batch, self.heads, (lines + 1) * b]),
        );
        let first = self.seq_kv.next_multiple_of(b) - self.seq_kv;
        let length = self.seq_q + self.seq_kv - 1;
        let all = Slice::from(first..first + length);
        B::float_slice(sums, &[Slice::full(), Slice::full(), all])
    }

    /// Diagonals of blocks as the gradient of the biases of distances.
    pub fn distances_of(&self, diagonals: FloatTensor<B>) -> FloatTensor<B> {
        let [heads, width] = self.relative;
        let reach = width / 2;
        let mut sums = B::float_sum_dim(self.untile_diagonals(diagonals), 0);
        if heads == 1 {
            sums = B::float_sum_dim(sums, 1);
        }
        let length = self.seq_q + self.seq_kv - 1;
        let sums = B::float_reshape(sums, Shape::new([heads, length]));
        // Element x is of `key − query = seq_q − 1 − x`: turned round, of `x + 1 − seq_kv`.
        let sums = B::float_flip(sums, &[1]);
        // As many distances as the table has, or more, on each side.
        let zeros = |missing: usize| {
            let shape = Shape::new([heads, missing]);
            (missing > 0).then(|| B::float_zeros(shape, &self.device, self.dtype))
        };
        let [before, behind] = [self.seq_kv, self.seq_q].map(|side| reach.saturating_sub(side - 1));
        let parts = [zeros(before), Some(sums), zeros(behind)];
        let sums = B::float_cat(parts.into_iter().flatten().collect(), 1);
        let length = length + before + behind;
        // Distances beyond the reach belong to the outermost.
        let first = self.seq_kv - 1 + before - reach;
        let part = |from: usize, to: usize| {
            B::float_slice(sums.clone(), &[Slice::full(), Slice::from(from..to)])
        };
        match reach {
            0 => B::float_sum_dim(sums, 1),
            _ => B::float_cat(
                vec![
                    B::float_sum_dim(part(0, first + 1), 1),
                    part(first + 1, first + width - 1),
                    B::float_sum_dim(part(first + width - 1, length), 1),
                ],
                1,
            ),
        }
    }
}
