//! Sums of weights over columns and diagonals.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{Shape, Slice};

use super::diagonals::diagonals_of;
use super::gather::{Chunk, Problem};
use super::scores::scores;
use crate::base::values::{AccumulatedInputs, AccumulatedOutput, AttentionInputs, LayoutTensors};
use crate::options::AttentionOptions;

/// Chunk by chunk: `p = exp(s − lse)`, summed over the rows of each block for the columns, and skewed and summed for the diagonals
/// ([`diagonals_of`]).
pub(crate) fn attention_sums<B: Backend>(
    inputs: AccumulatedInputs<B>,
    layout: &LayoutTensors<B>,
    options: &AttentionOptions,
    queries: Range<usize>,
) -> AccumulatedOutput<B> {
    let AccumulatedInputs {
        q,
        k,
        lse,
        scores: added,
    } = inputs;
    // The values do not matter.
    let inputs = AttentionInputs {
        v: k.clone(),
        q,
        k,
        scores: added,
    };
    let problem = Problem::<B>::new(&inputs, layout, options);
    let tiles = problem.tile_inputs(inputs);
    // Rows without keys have no weights; whatever their lse is, ∞ must not enter.
    let empty = B::float_is_inf(lse.clone(), layout.blocked.dtype().into());
    let lse = B::float_mask_fill(lse, empty, 0.0.into());
    let rows = Shape::new([problem.batch, problem.heads, problem.seq_q, 1]);
    let lse = problem.tile(B::float_reshape(lse, rows));

    let mut columns = problem.zeros([problem.num_columns(), problem.b]);
    let mut diagonals = problem.zeros([problem.num_diagonals(), 2 * problem.b - 1]);
    for chunk in problem.chunks() {
        let Some(chunk) = chunk.with_queries(&queries, problem.b) else {
            continue;
        };
        let q = problem.gather_queries(&tiles.q, &chunk);
        let k = problem.gather_keys(&tiles.k, &chunk);
        let s = scores(&problem, q, k, Some(&tiles), &chunk).s;
        let p = B::float_exp(B::float_sub(s, problem.gather_queries(&lse, &chunk)));
        let p = match problem.counted_rows(&chunk, &queries) {
            Some(counted) => B::float_mul(p, counted),
            None => p,
        };
        let sums = B::float_sum_dim(p.clone(), 1);
        columns = problem.add_rows(columns, chunk.column_places(&problem), sums);
        let sums = diagonals_of::<B>(problem.split_blocks(p, &chunk), problem.b);
        diagonals = problem.add_rows(diagonals, chunk.diagonal_places(&problem), sums);
    }
    AccumulatedOutput {
        columns: untile_columns(&problem, columns),
        diagonals: problem.untile_diagonals(diagonals),
    }
}

/// Columns of blocks to `[batch, heads, seq_kv]`.
fn untile_columns<B: Backend>(problem: &Problem<B>, columns: FloatTensor<B>) -> FloatTensor<B> {
    let (batch, heads) = (problem.batch, problem.heads);
    let length = columns.shape().num_elements() / (batch * heads);
    let columns = B::float_reshape(columns, Shape::new([batch, heads, length]));
    let keys = Slice::from(0..problem.seq_kv);
    B::float_slice(columns, &[Slice::full(), Slice::full(), keys])
}

impl<B: Backend> Problem<'_, B> {
    /// Columns of blocks over all heads.
    fn num_columns(&self) -> usize {
        self.batch * self.heads * self.kv_blocks
    }

    /// 1 for queries that count, 0 for others, if there are any in the chunk: `[T, b, 1]`.
    fn counted_rows(&self, chunk: &Chunk, queries: &Range<usize>) -> Option<FloatTensor<B>> {
        let rows = chunk.rows(self.b);
        let counts: Vec<f64> = rows
            .map(|row| {
                if queries.contains(&row) || row >= self.seq_q {
                    1.0
                } else {
                    0.0
                }
            })
            .collect();
        if !counts.contains(&0.0) {
            return None;
        }
        Some(self.numbers(counts, [chunk.tiles.len(), self.b, 1]))
    }
}
