//! From products to scores: scale, softcap and biases.

use cubecl::prelude::*;

use super::tile::*;
use crate::shared::addressing::*;
pub use crate::shared::biases::{BiasStrides, Distances};
use blocksparse::plan::Mainloop;

/// Scales and softcaps products.
#[cube]
pub fn score<A: Float>(s: &mut Array<A>, scale: A, softcap: A, #[comptime] t: Tile) {
    let inverse = A::new(1.0) / softcap;
    #[unroll]
    for i in 0..comptime!(t.unit_rows * 4) {
        s[i] *= scale;
        if comptime!(t.score.softcap) {
            s[i] = softcap * (s[i] * inverse).tanh();
        }
    }
}

/// The positions of a unit's rows and of its four columns in a step, where something depends on them; else empty.
#[derive(CubeType)]
pub struct Positions {
    /// Of the rows.
    pub rows: Array<usize>,
    /// Of the columns.
    pub cols: Array<usize>,
}

/// The positions of the unit's rows; those of the columns are set step by step.
#[cube]
pub fn row_positions(
    plan: &[u32],
    rows: usize,
    unit_y: usize,
    listing: &Listing,
    #[comptime] t: Tile,
) -> Positions {
    let length = comptime!(if t.score.positions() { t.unit_rows } else { 1 });
    let mut positions = Positions {
        rows: Array::<usize>::new(length),
        cols: Array::<usize>::new(4usize),
    };
    if comptime!(t.score.positions()) {
        let span = row_span(plan, rows, unit_y * length, listing, t);
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
    plan: &[u32],
    entry: usize,
    unit_x: usize,
    listing: &Listing,
    #[comptime] t: Tile,
) {
    if comptime!(t.score.positions()) {
        let span = column_span(plan, entry, unit_x, listing, t);
        #[unroll]
        for j in 0..4usize {
            positions.cols[j] = span.first + j * span.step;
        }
    }
}

/// Elements of queries and of keys.
#[derive(CubeType, Clone, Copy)]
pub struct SeqLengths {
    /// Queries.
    pub queries: usize,
    /// Keys.
    pub keys: usize,
}

/// A query and a key.
#[derive(CubeType, Clone, Copy)]
pub struct Pair {
    /// Row of the query.
    pub query: usize,
    /// Row of the key.
    pub key: usize,
}

/// The pair of row `i` and column `j`.
#[cube]
pub fn pair_at(
    positions: &Positions,
    #[comptime] i: usize,
    #[comptime] j: usize,
    #[comptime] mainloop: Mainloop,
) -> Pair {
    let mut query = positions.rows[i];
    let mut key = positions.cols[j];
    if comptime!(matches!(mainloop, Mainloop::Columns)) {
        query = positions.cols[j];
        key = positions.rows[i];
    }
    Pair { query, key }
}

/// Adds the biases of the unit's distances, the last query sitting at the last key: `table` has them from element `start` on.
#[cube]
pub fn add_distances<A: Float>(
    biases: &mut Array<A>,
    table: &[A],
    start: usize,
    reach: usize,
    positions: &Positions,
    lengths: &SeqLengths,
    #[comptime] mainloop: Mainloop,
    #[comptime] t: Tile,
) {
    if comptime!(t.score.relative) {
        #[unroll]
        for i in 0..comptime!(t.unit_rows) {
            #[unroll]
            for j in 0..4usize {
                let pair = pair_at(positions, i, j, mainloop);
                let query = pair.query + lengths.keys;
                let key = pair.key + lengths.queries;
                // reach + clamp(key − query, −reach, reach)
                let ahead = (key.max(query) - query).min(reach);
                let behind = (query.max(key) - key).min(reach);
                biases[comptime!(4 * i + j)] += table[start + reach + ahead - behind];
            }
        }
    }
}

/// What is added to the unit's scores, `[unit_rows · 4]`: `−slope · |distance|`, the last query sitting at the last key, and the
/// given bias, which begins at element `start`. [`add_distances`] adds the rest.
#[cube]
pub fn biases<E: Float, A: Float>(
    slope: A,
    bias: &ComptimeOption<Box<[E]>>,
    start: usize,
    bias_row: usize,
    positions: &Positions,
    lengths: &SeqLengths,
    #[comptime] mainloop: Mainloop,
    #[comptime] t: Tile,
) -> Array<A> {
    let mut biases = Array::<A>::new(comptime!(if t.score.biased() {
        t.unit_rows * 4
    } else {
        1
    }));
    if comptime!(t.score.biased()) {
        #[unroll]
        for i in 0..comptime!(t.unit_rows) {
            #[unroll]
            for j in 0..4usize {
                let pair = pair_at(positions, i, j, mainloop);
                let mut sum = A::new(0.0);
                if comptime!(t.score.alibi) {
                    let query = pair.query + lengths.keys;
                    let key = pair.key + lengths.queries;
                    sum -= slope * A::cast_from(query.max(key) - query.min(key));
                }
                if comptime!(t.score.bias) {
                    let bias = bias.as_ref().unwrap();
                    if pair.query < lengths.queries && pair.key < lengths.keys {
                        sum += A::cast_from(bias[start + pair.query * bias_row + pair.key]);
                    }
                }
                biases[comptime!(4 * i + j)] = sum;
            }
        }
    }
    biases
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
