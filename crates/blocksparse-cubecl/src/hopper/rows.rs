//! A tile's own rows, and how a unit's elements of a row become operands and 16 bytes of memory.

use cubecl::prelude::*;

use crate::arch::sm90::*;
use crate::shared::addressing::PlanParts;

/// A unit holds parts of rows `r` and `r + 8`.
pub const ROW_PAIR: u32 = 8;

/// How a tile's own rows lie: one behind the other, or if they are clustered in blocks of `group`.
#[derive(Clone, Copy)]
pub struct OwnShape {
    pub rows: usize,
    pub group: usize,
    pub clustered: bool,
}

/// Where a tile's own rows are: its first place, or the word of its first block.
#[cube]
pub fn own_rows(
    parts: &PlanParts,
    first_record: usize,
    tile: u32,
    #[comptime] own: OwnShape,
) -> u32 {
    let mut first = tile * comptime!(own.rows as u32);
    if comptime!(own.clustered) {
        let blocks = comptime!(own.rows / own.group);
        first = (parts.rows + (first_record + tile as usize) * blocks) as u32;
    }
    first
}

/// The place of a tile's own row. Rows of a clustered tile lie in blocks of `group`.
#[cube]
pub fn own_place(plan: &[u32], rows: u32, row: u32, #[comptime] own: OwnShape) -> u32 {
    let mut place = rows + row;
    if comptime!(own.clustered) {
        let block = comptime!(own.group as u32);
        place = plan[(rows + row / block) as usize] * block + row % block;
    }
    place
}

/// Places of two of a tile's own rows, of which a unit has parts.
#[derive(CubeType, Clone, Copy)]
pub struct RowPlaces {
    pub upper: u32,
    pub lower: u32,
}

/// The places of the unit's own rows: `row`, and [`ROW_PAIR`] behind it.
#[cube]
pub fn own_places(plan: &[u32], rows: u32, row: u32, #[comptime] own: OwnShape) -> RowPlaces {
    let upper = own_place(plan, rows, row, own);
    let lower = own_place(plan, rows, row + ROW_PAIR, own);
    RowPlaces { upper, lower }
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
        p.insert(
            i,
            pack(
                s.extract(comptime!(2 * i)),
                s.extract(comptime!(2 * i + 1)),
                half,
            ),
        );
    }
    p
}
