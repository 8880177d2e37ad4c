//! A tile's own rows, and the packing of a unit's elements into operands and 16-byte stores.

use cubecl::prelude::*;

use super::base::Base;
use crate::arch::sm90::*;
use crate::shared::own_rows::{OwnShape, own_place};

/// A unit holds parts of rows `r` and `r + 8`.
pub const ROW_PAIR: u32 = 8;

/// Places of the two own rows that a unit has parts of.
#[derive(CubeType, Clone, Copy)]
pub struct RowPlaces {
    pub upper: u32,
    pub lower: u32,
}

/// Returns the places of the unit's own rows `row` and `row + ROW_PAIR`.
#[cube]
pub fn own_places(plan: &[u32], rows: u32, row: u32, #[comptime] own: OwnShape) -> RowPlaces {
    let upper = own_place(plan, rows, row, own);
    let lower = own_place(plan, rows, row + ROW_PAIR, own);
    RowPlaces { upper, lower }
}

/// Loads box `index` of a tile's own rows of a tensor into the shared memory at `start`.
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

/// Whether the width includes the unit's group of eight columns within the `i`-th 32 columns.
#[cube]
pub fn within(lane: u32, #[comptime] i: usize, #[comptime] dim: usize) -> bool {
    let mut is = true.runtime();
    if comptime!(dim < 32 * (i + 1)) {
        is = lane % 4 < comptime!((dim / 8 - 4 * i) as u32);
    }
    is
}

/// Packs `p` as the left operand of a product. Registers 4k … 4k + 3 belong to depth step k.
#[cube]
pub fn pack_all<S: Size, P: Size>(s: Vector<f32, S>, #[comptime] half: Half) -> Vector<u32, P> {
    let mut p = Vector::<u32, P>::zeroed();
    #[unroll]
    for i in 0..P::value() {
        p.insert(i, pack_at::<S>(&s, comptime!(2 * i), half));
    }
    p
}
