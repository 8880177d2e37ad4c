//! From products to scores: scale, softcap and biases by position.

use cubecl::prelude::*;

use super::tile::*;
use crate::plan::Walk;

/// Scales and softcaps products.
#[cube]
pub fn score<A: Float>(s: &mut Array<A>, scale: A, softcap: A, #[comptime] t: Tile) {
    #[unroll]
    for i in 0..comptime!(t.unit_rows * 4) {
        s[i] *= scale;
        if comptime!(t.softcap) {
            s[i] = softcap * (s[i] / softcap).tanh();
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
    let length = comptime!(if t.positions() { t.unit_rows } else { 1 });
    let mut positions = Positions {
        rows: Array::<usize>::new(length),
        cols: Array::<usize>::new(4usize),
    };
    if comptime!(t.positions()) {
        #[unroll]
        for i in 0..length {
            let place = row_place(plan, rows, unit_y * length + i, t);
            positions.rows[i] = position_at(place, listing, t);
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
    if comptime!(t.positions()) {
        // A block has at least eight positions, so that the four are neighbours.
        let first = place(plan, entry, unit_x * 4, t);
        #[unroll]
        for j in 0..4usize {
            positions.cols[j] = position_at(first + j, listing, t);
        }
    }
}

/// Numbers of queries and of keys.
#[derive(CubeType, Clone, Copy)]
pub struct Lengths {
    /// Queries.
    pub queries: usize,
    /// Keys.
    pub keys: usize,
}

/// The ALiBi bias of the unit's pair `(i, j)`: `−slope · |distance|`, the last query sitting at the last key.
#[cube]
pub fn alibi<A: Float>(
    slope: A,
    positions: &Positions,
    lengths: &Lengths,
    #[comptime] i: usize,
    #[comptime] j: usize,
    #[comptime] walk: Walk,
) -> A {
    let mut query = positions.rows[i];
    let mut key = positions.cols[j];
    if comptime!(matches!(walk, Walk::Columns)) {
        query = positions.cols[j];
        key = positions.rows[i];
    }
    let query = query + lengths.keys;
    let key = key + lengths.queries;
    A::new(0.0) - slope * A::cast_from(query.max(key) - query.min(key))
}

/// Adds the ALiBi biases to the unit's scores.
#[cube]
pub fn add_alibi<A: Float>(
    s: &mut Array<A>,
    slope: A,
    positions: &Positions,
    lengths: &Lengths,
    #[comptime] walk: Walk,
    #[comptime] t: Tile,
) {
    if comptime!(t.alibi) {
        #[unroll]
        for i in 0..comptime!(t.unit_rows) {
            #[unroll]
            for j in 0..4usize {
                s[comptime!(4 * i + j)] += alibi::<A>(slope, positions, lengths, i, j, walk);
            }
        }
    }
}
