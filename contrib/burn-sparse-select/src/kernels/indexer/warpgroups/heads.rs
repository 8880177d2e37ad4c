//! What the heads of a query give a key, added up.

use cubecl::prelude::*;

use crate::kernels::indexer::pairs::{Ending, Sizes, finished, term};
use crate::kernels::indexer::warpgroups::{COLUMNS, EIGHT};
use blocksparse_cubecl::arch::ptx::shuffle_xor;
use blocksparse_cubecl::arch::sm80::shared_load_pair;

/// What is known of the sums when they are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HeadSums {
    /// Heads of a query.
    pub heads: usize,
    pub is_weights: bool,
}

impl HeadSums {
    /// Queries of a step.
    pub fn queries(&self) -> usize {
        COLUMNS / self.heads
    }
}

/// What a query gives the unit's two keys.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Totals {
    low: f32,
    high: f32,
}

#[cube]
impl Totals {
    /// With those of other heads.
    pub fn with(&self, other: &Totals) -> Totals {
        Totals {
            low: self.low + other.low,
            high: self.high + other.high,
        }
    }
}

/// Where numbers are written, and for whom.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Keys {
    pub entry: usize,
    /// The warp's first key.
    pub first: usize,
    pub lane: u32,
    /// What the sums of the key are multiplied by that the lane writes.
    pub scale: f32,
}

#[cube]
impl Keys {
    /// The key that the lane writes the sums of: each of the four that share sums writes others.
    pub fn own(&self) -> usize {
        own_key(self.first, self.lane)
    }
}

/// As [`Keys::own`].
#[cube]
pub(crate) fn own_key(first: usize, lane: u32) -> usize {
    first + (lane / 4 + lane % 2 * 8) as usize
}

/// Adds up what the unit's columns of a query of a step give. What they have in `of_rows` is at `pair`, that of the first column.
#[cube]
pub(crate) fn totals_of<N: Size>(
    products: &Vector<f32, N>,
    pair: u32,
    #[comptime] query: usize,
    ending: &Ending,
    #[comptime] of: HeadSums,
) -> Totals {
    let eights = comptime!(of.heads / EIGHT);
    // Of either column sums of their own, so that fewer wait for each other.
    let mut low = Array::<f32>::new(2usize);
    let mut high = Array::<f32>::new(2usize);
    #[unroll]
    for column in 0..2usize {
        low[column] = 0.0f32;
        high[column] = 0.0f32;
    }
    #[unroll]
    for eight in 0..eights {
        let n = comptime!(query * eights + eight);
        let of_rows = shared_load_pair(pair + comptime!((n * EIGHT * 4) as u32));
        #[unroll]
        for column in 0..2usize {
            let mut of_row = f32::reinterpret(of_rows.extract(column));
            if comptime!(of.is_weights) {
                of_row *= comptime!(std::f32::consts::LOG2_E);
            }
            let at = comptime!(4 * n + column);
            let lower = products.extract(at);
            let upper = products.extract(comptime!(at + 2));
            low[column] += term(lower, of_row, ending, of.is_weights);
            high[column] += term(upper, of_row, ending, of.is_weights);
        }
    }
    Totals {
        low: low[0usize] + low[1usize],
        high: high[0usize] + high[1usize],
    }
}

/// No query's.
#[cube]
pub(crate) fn no_totals() -> Totals {
    Totals {
        low: 0.0f32.runtime(),
        high: 0.0f32.runtime(),
    }
}

/// The sum of a query and a key: of the four lanes that have parts of those of two queries and two keys each gets one.
#[cube]
pub(crate) fn traded(first: Totals, second: Totals, lane: u32) -> f32 {
    let is_second = lane % 4 >= 2;
    let is_high = lane % 2 == 1;
    // A lane keeps the sums of its own query, and gives those of the other away.
    let mut low = select(is_second, second.low, first.low);
    let mut high = select(is_second, second.high, first.high);
    low += shuffle_xor(select(is_second, first.low, second.low), 2u32);
    high += shuffle_xor(select(is_second, first.high, second.high), 2u32);
    let mut sum = select(is_high, high, low);
    sum += shuffle_xor(select(is_high, low, high), 1u32);
    sum
}

/// Writes the sums of two queries, from `row` on, or of one: of the four lanes that have parts of them each those of a query and a key.
#[cube]
pub(crate) fn write_two(
    first: Totals,
    second: Totals,
    out: &mut [f32],
    row: usize,
    keys: &Keys,
    s: &Sizes,
    ending: &Ending,
    #[comptime] both: bool,
    #[comptime] of: HeadSums,
) {
    let is_second = keys.lane % 4 >= 2;
    let mut sum = traded(first, second, keys.lane);
    sum *= keys.scale;
    let row = row + (keys.lane % 4 / 2) as usize;
    let column = keys.own();
    let mut is_there = row < s.rows && column < s.columns;
    if comptime!(!both) {
        is_there = is_there && !is_second;
    }
    if is_there {
        let (key, position) = (column as i32, s.position(row));
        let sum = finished(sum, key, position, s.heads, ending, of.is_weights);
        out[(keys.entry * s.rows + row) * s.columns + column] = sum;
    }
}
