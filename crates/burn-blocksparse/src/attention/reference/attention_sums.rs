//! Sums of weights over columns and diagonals.

use std::ops::Range;

use super::diagonals::diagonals_of;
use super::gather::{Chunk, Problem};
use super::scores::scores;
use crate::base::prelude::*;
use crate::base::values::{AccumulatedInputs, AccumulatedOutput, AttentionInputs, LayoutTensors};
use crate::options::AttentionOptions;

/// Computes `p = exp(s − lse)` chunk by chunk, sums it over the rows of each block for the columns, and skews and sums it for the diagonals
/// ([`diagonals_of`]).
pub(crate) fn attention_sums<B: Backend>(
    inputs: AccumulatedInputs<B>,
    layout: &LayoutTensors<B>,
    options: &AttentionOptions,
    queries: Range<usize>,
) -> AccumulatedOutput<B> {
    let lse = inputs.lse;
    // The values are not used.
    let inputs = AttentionInputs {
        v: inputs.k.clone(),
        q: inputs.q,
        k: inputs.k,
        scores: inputs.scores,
    };
    let problem = Problem::<B>::new(&inputs, layout, options);
    let tiles = problem.tile_inputs(inputs);
    // Rows without keys have no weights. Their lse may be infinite and must not enter.
    let empty = B::float_is_inf(lse.clone(), layout.blocked.dtype().into());
    let lse = Array::<B>(lse).fill(empty, 0.0);
    let lse = problem.tile(lse.reshape([problem.batch, problem.heads, problem.seq_q, 1]));

    let mut columns = problem.zeros([problem.num_columns(), problem.b]);
    let mut diagonals = problem.zeros([problem.num_diagonals(), 2 * problem.b - 1]);
    for chunk in problem.chunks() {
        let Some(chunk) = chunk.with_queries(&queries, problem.b) else {
            continue;
        };
        let q = problem.gather_queries(&tiles.q, &chunk);
        let k = problem.gather_keys(&tiles.k, &chunk);
        let s = scores(&problem, q, k, Some(&tiles), &chunk).s;
        let p = (s - problem.gather_queries(&lse, &chunk)).exp();
        let p = match problem.counted_rows(&chunk, &queries) {
            Some(counted) => p * counted,
            None => p,
        };
        let sums = p.clone().sum_dim(1);
        columns = problem.add_rows(columns, chunk.column_places(&problem), sums);
        let sums = diagonals_of(problem.split_blocks(p, &chunk), problem.b);
        diagonals = problem.add_rows(diagonals, chunk.diagonal_places(&problem), sums);
    }
    let [batch, heads] = [problem.batch, problem.heads];
    let length = problem.kv_blocks * problem.b;
    let columns = columns.reshape([batch, heads, length]);
    AccumulatedOutput {
        columns: columns.narrow(2, 0..problem.seq_kv).0,
        diagonals: problem.untile_diagonals(diagonals).0,
    }
}

impl<B: Backend> Problem<'_, B> {
    /// Returns the number of block columns over all heads.
    fn num_columns(&self) -> usize {
        self.batch * self.heads * self.kv_blocks
    }

    /// Returns `[T, b, 1]` with 1 for included queries and 0 for others, or `None` if the chunk has no excluded queries.
    fn counted_rows(&self, chunk: &Chunk, queries: &Range<usize>) -> Option<Array<B>> {
        let rows = chunk.rows(self.b);
        let counts = rows.map(|row| queries.contains(&row) || row >= self.seq_q);
        let counts: Vec<f64> = counts.map(|counts| f64::from(u8::from(counts))).collect();
        let shape = [chunk.tiles.len(), self.b, 1];
        (counts.contains(&0.0)).then(|| self.numbers(counts, shape))
    }
}
