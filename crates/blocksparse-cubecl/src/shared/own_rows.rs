//! Locations of a tile's own rows, on the tensor-core tiers.

use cubecl::prelude::*;

use super::addressing::PlanParts;

/// Arrangement of a tile's own rows: consecutive, or in blocks of `group` if clustered.
#[derive(Clone, Copy)]
pub struct OwnShape {
    pub rows: usize,
    pub group: usize,
    pub clustered: bool,
}

/// Returns a tile's first place, or the word of its first block if clustered.
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

/// Returns the place of a tile's own row.
#[cube]
pub fn own_place(plan: &[u32], rows: u32, row: u32, #[comptime] own: OwnShape) -> u32 {
    let mut place = rows + row;
    if comptime!(own.clustered) {
        let block = comptime!(own.group as u32);
        place = plan[(rows + row / block) as usize] * block + row % block;
    }
    place
}
