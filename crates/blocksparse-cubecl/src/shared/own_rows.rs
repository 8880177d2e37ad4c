//! Where a tile's own rows are, on the tensor-core tiers.

use cubecl::prelude::*;

use super::addressing::PlanParts;

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
