//! A tile's own rows, and how a unit's elements of a row become operands and 16 bytes of memory.

use cubecl::prelude::*;

use super::base::Base;
use crate::arch::sm90::*;
use crate::shared::own_rows::{OwnShape, own_place};

/// A unit holds parts of rows `r` and `r + 8`.
pub const ROW_PAIR: u32 = 8;

/// Places of two of a tile's own rows, of which a unit has parts.
#[derive(CubeType, Clone, Copy)]
pub struct RowPlaces {
    pub upper: u32,
    pub lower: u32,
}

/// The places of the unit's own rows: `row`, and [`ROW_PAIR`] after it.
#[cube]
pub fn own_places(plan: &[u32], rows: u32, row: u32, #[comptime] own: OwnShape) -> RowPlaces {
    let upper = own_place(plan, rows, row, own);
    let lower = own_place(plan, rows, row + ROW_PAIR, own);
    RowPlaces { upper, lower }
}

/// Loads box `index` of a tensor's own rows of a tile to shared memory, where they begin at `start`.
#[cube]
pub fn load_own(
    map: u64,
    plan: &[u32],
    start: u32,
    bar: u32,
    rows: u32,
    index: u32,
    class_len: u32,
    head: u32,
    batch: u32,
    #[comptime] t: Base,
) {
    let span = index % comptime!(t.spans() as u32);
    let row = index / comptime!(t.spans() as u32) * comptime!(t.a_group() as u32);
    let target = start + span * comptime!((t.rows() * ROW) as u32) + row * comptime!(ROW as u32);
    let place = own_place(plan, rows, row, comptime!(t.own_shape()));
    load_at(
        map, target, bar, span, place, class_len, head, batch, t.residue,
    );
}

/// Whether the width has the eight of the `i`-th 32 columns of a row that a unit stores.
#[cube]
pub fn within(lane: u32, #[comptime] i: usize, #[comptime] dim: usize) -> bool {
    let mut is = true.runtime();
    if comptime!(dim < 32 * (i + 1)) {
        is = lane % 4 < comptime!((dim / 8 - 4 * i) as u32);
    }
    is
}

/// `p` as the left operand of a product. Its registers 4k … 4k + 3 are those of depth step k.
#[cube]
pub fn pack_all<S: Size, P: Size>(s: Vector<f32, S>, #[comptime] half: Half) -> Vector<u32, P> {
    let mut p = Vector::<u32, P>::zeroed();
    #[unroll]
    for i in 0..P::value() {
        p.insert(i, pack_at::<S>(&s, comptime!(2 * i), half));
    }
    p
}
