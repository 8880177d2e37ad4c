//! Rows of the forward kernel's output.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

pub use super::gradient::RowPosition;
use super::gradient::row_position;
use super::rows::within;
use super::tiles::Tile;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, PlanWords};
use crate::shared::own_rows::own_place;

/// Compile-time parameters of an output row.
#[derive(Clone, Copy, Debug)]
pub struct OutShape {
    pub value_dim: usize,
    pub half: Half,
    /// Whether weights have dropout.
    pub dropout: bool,
}

impl OutShape {
    pub fn of(tile: &Tile) -> Self {
        Self {
            value_dim: tile.value_dim,
            half: tile.half,
            dropout: tile.score.dropout,
        }
    }
}

/// Returns the unit's row `offset` rows below its first one.
#[cube]
pub fn row_of_unit(
    plan: &PlanWords,
    rows: u32,
    offset: u32,
    seq_q: u32,
    #[comptime] t: Tile,
) -> RowPosition {
    let unit = unit();
    let row = unit / 32 * 16 + unit % 32 / 4 + offset;
    let place = own_place(&plan.words[..], rows, row, comptime!(t.own_shape()));
    row_position(place, &plan.listing, seq_q, t.residue)
}

#[cube]
pub fn quad_sum(x: f32) -> f32 {
    let x = x + shuffle_xor(x, 1u32);
    x + shuffle_xor(x, 2u32)
}

/// Stores one of the unit's two rows, whose elements begin at `offset` of every four, and its `lse = (m + log2 l) · ln 2`. `factor` is that of dropout. A
/// row without keys gets 0 and −∞.
#[cube]
pub fn store_row<O: Size>(
    out: &mut [Vector<u32, Four>],
    lse: &mut [f32],
    o: &Vector<f32, O>,
    #[comptime] offset: usize,
    m: f32,
    l: f32,
    factor: f32,
    first: u32,
    row: &RowPosition,
    #[comptime] t: OutShape,
) {
    let mut inverse = f32::new(0.0);
    let mut log = f32::new(f32::NEG_INFINITY);
    if l > 0.0f32 {
        inverse = reciprocal(l);
        if comptime!(t.dropout) {
            inverse *= factor;
        }
        log = (m + log2(l)) * comptime!(std::f32::consts::LN_2);
    }
    write_row::<O>(out, o, offset, inverse, first, row, t);
    if row.exists && unit() % 4 == 0 {
        lse[(first + row.position) as usize] = log;
    }
}

/// Stores one of the unit's two rows, whose elements begin at `offset` of every four, times `factor`.
#[cube]
pub fn write_row<O: Size>(
    out: &mut [Vector<u32, Four>],
    o: &Vector<f32, O>,
    #[comptime] offset: usize,
    factor: f32,
    first: u32,
    row: &RowPosition,
    #[comptime] t: OutShape,
) {
    let lane = unit() % 32;
    let at = (first + row.position) as usize;
    let target = at * comptime!(t.value_dim / 8) + (lane % 4) as usize;
    #[unroll]
    for i in 0..comptime!(t.value_dim.div_ceil(32)) {
        let mut own = Vector::<u32, Four>::zeroed();
        #[unroll]
        for j in 0..4usize {
            let n = comptime!(16 * i + 4 * j + offset);
            let low = o.extract(n) * factor;
            let high = o.extract(comptime!(n + 1)) * factor;
            own.insert(j, pack(low, high, t.half));
        }
        let four = trade_four(own, lane);
        if row.exists && within(lane, i, t.value_dim) {
            out[target + comptime!(4 * i)] = four;
        }
    }
}

/// The largest scores of the unit's two rows, if they are written. They are separate from the softmax's maxima, which are raised only by large steps.
#[derive(CubeType)]
pub struct RowTops {
    of_rows: Array<f32>,
}

#[cube]
impl RowTops {
    pub fn new(#[comptime] t: Tile) -> RowTops {
        let rows = comptime!(if t.max_scores { 2 } else { 0 });
        let mut of_rows = Array::<f32>::new(comptime!(rows.max(1)));
        #[unroll]
        for i in 0..rows {
            of_rows[i] = f32::new(f32::NEG_INFINITY);
        }
        RowTops { of_rows }
    }

    /// Updates them with those of a step.
    pub fn raise(&mut self, upper: f32, lower: f32, #[comptime] t: Tile) {
        if comptime!(t.max_scores) {
            self.of_rows[0] = larger(self.of_rows[0], upper);
            self.of_rows[1] = larger(self.of_rows[1], lower);
        }
    }

    /// Stores one of them in natural units. With `carry`, takes the maximum with that of earlier parts.
    pub fn store(
        &self,
        max_scores: &mut [f32],
        #[comptime] index: usize,
        first: u32,
        row: &RowPosition,
        log2_scale: f32,
        #[comptime] t: Tile,
    ) {
        let at = (first + row.position) as usize;
        if row.exists && unit() % 4 == 0 {
            let mut most = self.of_rows[index] * log2_scale * comptime!(std::f32::consts::LN_2);
            if comptime!(t.carry) {
                most = larger(most, max_scores[at]);
            }
            max_scores[at] = most;
        }
    }
}

/// Reads the `i`-th 16 bytes of what `store_row` wrote, if the row exists.
#[cube]
pub fn read_four(
    out: &[Vector<u32, Four>],
    row: &RowPosition,
    first: u32,
    #[comptime] i: usize,
    #[comptime] t: Tile,
) -> Vector<u32, Four> {
    let target =
        (first + row.position) as usize * comptime!(t.value_dim / 8) + (unit() % 4) as usize;
    let mut four = Vector::<u32, Four>::zeroed();
    if row.exists && within(unit() % 32, i, t.value_dim) {
        four = out[target + comptime!(4 * i)];
    }
    four
}

/// Unpacks the unit's upper or lower row into its part of the output in registers.
#[cube]
pub fn unpack_row<O: Size>(
    o_in: Vector<f32, O>,
    fours: &Array<Vector<u32, Four>>,
    #[comptime] lower: usize,
    #[comptime] t: Tile,
) -> Vector<f32, O> {
    let mut o = o_in;
    let lane = unit() % 32;
    #[unroll]
    for i in 0..comptime!(t.value_dim.div_ceil(32)) {
        let own = trade_four(fours[comptime!(lower * t.value_dim.div_ceil(32) + i)], lane);
        #[unroll]
        for j in 0..4usize {
            let n = comptime!(16 * i + 4 * j + 2 * lower);
            o.insert(n, unpack(own.extract(j), false, t.half));
            o.insert(comptime!(n + 1), unpack(own.extract(j), true, t.half));
        }
    }
    o
}
