//! Sums over the heads of a query for each key.

use cubecl::prelude::*;

use crate::kernels::indexer::pairs::{Ending, Sizes, finished, term};
use crate::kernels::indexer::warpgroups::{COLUMNS, EIGHT};
use blocksparse_cubecl::arch::ptx::shuffle_xor;
use blocksparse_cubecl::arch::sm80::shared_load_pair;

/// Compile-time parameters of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HeadSums {
    /// Number of heads of a query.
    pub heads: usize,
    pub is_weights: bool,
}

impl HeadSums {
    /// Returns the number of queries of a step.
    pub fn queries(&self) -> usize {
        COLUMNS / self.heads
    }
}

/// Partial sums of a query for the unit's two keys.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Totals {
    low: f32,
    high: f32,
}

#[cube]
impl Totals {
    /// Returns the sum with totals of other heads.
    pub fn with(&self, other: &Totals) -> Totals {
        Totals {
            low: self.low + other.low,
            high: self.high + other.high,
        }
    }
}

/// The keys of a warp, and the destination of their sums.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Keys {
    pub entry: usize,
    /// First key of the warp.
    pub first: usize,
    pub lane: u32,
    /// Factor of the sums of the key that the lane writes.
    pub scale: f32,
}

#[cube]
impl Keys {
    /// Returns the key whose sums the lane writes. Each of the four lanes that share sums writes different ones.
    pub fn own(&self) -> usize {
        own_key(self.first, self.lane)
    }
}

/// See [`Keys::own`].
#[cube]
pub(crate) fn own_key(first: usize, lane: u32) -> usize {
    first + (lane / 4 + lane % 2 * 8) as usize
}

/// Sums the unit's columns of a query of a step. `pair` is the address of the `of_rows` entry of its first column.
#[cube]
pub(crate) fn totals_of<N: Size>(
    products: &Vector<f32, N>,
    pair: u32,
    #[comptime] query: usize,
    ending: &Ending,
    #[comptime] of: HeadSums,
) -> Totals {
    let eights = comptime!(of.heads / EIGHT);
    // Separate sums per column shorten dependency chains.
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

/// Totals of no query.
#[cube]
pub(crate) fn no_totals() -> Totals {
    Totals {
        low: 0.0f32.runtime(),
        high: 0.0f32.runtime(),
    }
}

/// Returns the sum of one query and key per lane: four lanes hold parts of the sums of two queries and two keys, and each gets one total.
#[cube]
pub(crate) fn traded(first: Totals, second: Totals, lane: u32) -> f32 {
    let is_second = lane % 4 >= 2;
    let is_high = lane % 2 == 1;
    // A lane keeps its own query's sums, and sends those of the other.
    let mut low = select(is_second, second.low, first.low);
    let mut high = select(is_second, second.high, first.high);
    low += shuffle_xor(select(is_second, first.low, second.low), 2u32);
    high += shuffle_xor(select(is_second, first.high, second.high), 2u32);
    let mut sum = select(is_high, high, low);
    sum += shuffle_xor(select(is_high, low, high), 1u32);
    sum
}

/// Writes the sums of two queries from `row` on, or of one. Each of the four lanes that hold their parts writes those of one query and key.
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
