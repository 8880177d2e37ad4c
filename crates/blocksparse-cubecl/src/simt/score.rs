//! From products to scores: scale, softcap and biases.

use cubecl::prelude::*;

use super::tile::*;
use crate::shared::addressing::*;
use crate::shared::biases::{Distances, ScoreBiases};
use crate::shared::score::ScoreInputs;

/// Scales and softcaps products.
#[cube]
pub fn score<A: Float>(s: &mut Array<A>, of_head: &HeadScores<A>, #[comptime] t: Tile) {
    let inverse = A::new(1.0) / of_head.softcap;
    #[unroll]
    for i in 0..comptime!(t.unit_rows * 4) {
        s[i] *= of_head.scale;
        if comptime!(t.score.softcap) {
            s[i] = of_head.softcap * (s[i] * inverse).tanh();
        }
    }
}

/// Positions of a unit's rows and of its four columns in a step. Unset if nothing depends on them.
#[derive(CubeType)]
pub struct Positions {
    /// Positions of the rows.
    pub rows: Array<usize>,
    /// Positions of the columns.
    pub cols: Array<usize>,
}

/// Returns the positions of the unit's rows. Those of the columns are set in each step.
#[cube]
pub fn row_positions(plan: &PlanWords, rows: usize, unit: &Unit, #[comptime] t: Tile) -> Positions {
    let length = comptime!(if t.score.positions() { t.unit_rows } else { 1 });
    let mut positions = Positions {
        rows: Array::<usize>::new(length),
        cols: Array::<usize>::new(4usize),
    };
    if comptime!(t.score.positions()) {
        let span = row_span(plan, rows, unit.y * length, t);
        #[unroll]
        for i in 0..length {
            positions.rows[i] = span.first + i * span.step;
        }
    }
    positions
}

/// Sets the positions of the unit's columns in the step whose first entry is at word `entry`.
#[cube]
pub fn set_columns(
    positions: &mut Positions,
    plan: &PlanWords,
    entry: usize,
    unit: &Unit,
    #[comptime] t: Tile,
) {
    if comptime!(t.score.positions()) {
        let span = column_span(plan, entry, unit.x, t);
        #[unroll]
        for j in 0..4usize {
            positions.cols[j] = span.first + j * span.step;
        }
    }
}

/// Sequence lengths.
#[derive(CubeType, Clone, Copy)]
pub struct SeqLengths {
    /// Number of queries.
    pub queries: usize,
    /// Number of keys.
    pub keys: usize,
}

/// Returns the sequence lengths, given those of a tile's own rows and of the gathered rows.
#[cube]
pub fn lengths_of(own: usize, gathered: usize, #[comptime] t: Tile) -> SeqLengths {
    if comptime!(t.columns()) {
        SeqLengths {
            queries: gathered,
            keys: own,
        }
    } else {
        SeqLengths {
            queries: own,
            keys: gathered,
        }
    }
}

#[derive(CubeType, Clone, Copy)]
pub struct Pair {
    /// Position of the query.
    pub query: usize,
    /// Position of the key.
    pub key: usize,
}

/// Returns the pair of row `i` and column `j`.
#[cube]
pub fn pair_at(
    positions: &Positions,
    #[comptime] i: usize,
    #[comptime] j: usize,
    #[comptime] t: Tile,
) -> Pair {
    let mut query = positions.rows[i];
    let mut key = positions.cols[j];
    if comptime!(t.columns()) {
        query = positions.cols[j];
        key = positions.rows[i];
    }
    Pair { query, key }
}

/// Parameters of a head's scores.
#[derive(CubeType, Clone, Copy)]
pub struct HeadScores<A: Float> {
    pub scale: A,
    pub softcap: A,
    /// ALiBi slope.
    pub slope: A,
    /// Start of its bias tensor.
    pub bias_start: usize,
    /// Start of its table of distances.
    pub table_start: usize,
}

/// Returns the parameters of a head with this slope.
#[cube]
pub fn head_scores<E: Float, A: Float>(
    scores: &ScoreInputs,
    biases: &ScoreBiases<E, A>,
    slope: A,
    batch: usize,
    head: usize,
) -> HeadScores<A> {
    HeadScores::<A> {
        scale: scores.scale.get::<A>(),
        softcap: scores.softcap.get::<A>(),
        slope,
        bias_start: batch * biases.strides.batch + head * biases.strides.head,
        table_start: biases.distances.start + head * biases.distances.head,
    }
}

/// Returns the biases of the unit's scores, `[unit_rows · 4]`, with the table of distances in the stats.
#[cube]
pub fn biases_in_stats<E: Float, A: Float>(
    of_head: &HeadScores<A>,
    biases: &ScoreBiases<E, A>,
    stats: &[A],
    positions: &Positions,
    lengths: &SeqLengths,
    #[comptime] t: Tile,
) -> Array<A> {
    let mut sums = unit_biases::<E, A>(of_head, biases, positions, lengths, t);
    add_distances(
        &mut sums,
        stats,
        of_head,
        &biases.distances,
        positions,
        lengths,
        t,
    );
    sums
}

/// Returns the biases of the unit's scores, `[unit_rows · 4]`, with the table of distances in its own buffer.
#[cube]
pub fn biases_in_table<E: Float, A: Float>(
    of_head: &HeadScores<A>,
    biases: &ScoreBiases<E, A>,
    positions: &Positions,
    lengths: &SeqLengths,
    #[comptime] t: Tile,
) -> Array<A> {
    let mut sums = unit_biases::<E, A>(of_head, biases, positions, lengths, t);
    if comptime!(t.score.relative) {
        let table = &biases.table.as_ref().unwrap()[..];
        add_distances(
            &mut sums,
            table,
            of_head,
            &biases.distances,
            positions,
            lengths,
            t,
        );
    }
    sums
}

/// Returns `−slope · |distance|`, with the last query aligned to the last key, plus the bias tensor.
#[cube]
fn unit_biases<E: Float, A: Float>(
    of_head: &HeadScores<A>,
    biases: &ScoreBiases<E, A>,
    positions: &Positions,
    lengths: &SeqLengths,
    #[comptime] t: Tile,
) -> Array<A> {
    let mut sums = Array::<A>::new(comptime!(if t.score.biased() {
        t.unit_rows * 4
    } else {
        1
    }));
    if comptime!(t.score.biased()) {
        #[unroll]
        for i in 0..comptime!(t.unit_rows) {
            #[unroll]
            for j in 0..4usize {
                let pair = pair_at(positions, i, j, t);
                let mut sum = A::new(0.0);
                if comptime!(t.score.alibi) {
                    let query = pair.query + lengths.keys;
                    let key = pair.key + lengths.queries;
                    sum -= of_head.slope * A::cast_from(query.max(key) - query.min(key));
                }
                if comptime!(t.score.bias) {
                    let bias = biases.bias.as_ref().unwrap();
                    if pair.query < lengths.queries && pair.key < lengths.keys {
                        let row = of_head.bias_start + pair.query * biases.strides.row;
                        sum += A::cast_from(bias[row + pair.key]);
                    }
                }
                sums[comptime!(4 * i + j)] = sum;
            }
        }
    }
    sums
}

/// Adds the biases of the unit's distances from `table`.
#[cube]
fn add_distances<A: Float>(
    sums: &mut Array<A>,
    table: &[A],
    of_head: &HeadScores<A>,
    distances: &Distances,
    positions: &Positions,
    lengths: &SeqLengths,
    #[comptime] t: Tile,
) {
    if comptime!(t.score.relative) {
        let reach = distances.reach;
        #[unroll]
        for i in 0..comptime!(t.unit_rows) {
            #[unroll]
            for j in 0..4usize {
                let pair = pair_at(positions, i, j, t);
                let query = pair.query + lengths.keys;
                let key = pair.key + lengths.queries;
                // The index is reach + clamp(key − query, −reach, reach).
                let ahead = (key.max(query) - query).min(reach);
                let behind = (query.max(key) - key).min(reach);
                sums[comptime!(4 * i + j)] += table[of_head.table_start + reach + ahead - behind];
            }
        }
    }
}

/// Adds the biases to the unit's scores.
#[cube]
pub fn add_biases<A: Float>(s: &mut Array<A>, biases: &Array<A>, #[comptime] t: Tile) {
    if comptime!(t.score.biased()) {
        #[unroll]
        for i in 0..comptime!(t.unit_rows * 4) {
            s[i] += biases[i];
        }
    }
}
