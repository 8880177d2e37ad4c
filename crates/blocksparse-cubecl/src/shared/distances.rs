//! Table of distances on the tensor-core tiers.

use cubecl::prelude::*;

/// A table of biases of distances as kernel arguments.
#[derive(CubeType, CubeLaunch)]
pub struct TableArgs {
    /// `[heads or 1, 2 · reach + 1]`
    pub numbers: Box<[f32]>,
    /// Elements per head, 0 if heads share them.
    pub head: u32,
    /// Largest distance with a bias of its own.
    pub reach: u32,
}

/// Range of a head's elements in the table.
#[derive(CubeType, Clone, Copy)]
pub struct HeadTable {
    first: i32,
    /// Element of distance 0.
    zero: i32,
    last: i32,
}

/// Returns the range of a head.
#[cube]
pub fn table_of(table: &TableArgs, head: u32) -> HeadTable {
    let first = i32::cast_from(head * table.head);
    let reach = i32::cast_from(table.reach);
    HeadTable {
        first,
        zero: first + reach,
        last: first + 2 * reach,
    }
}

/// Returns an empty range, without a table.
#[cube]
pub fn no_table() -> HeadTable {
    HeadTable {
        first: 0i32,
        zero: 0i32,
        last: 0i32,
    }
}

/// Returns the bias of a key `ahead` positions after its query. The index is clamped to the head's range.
#[cube]
pub fn distance_bias(table: &TableArgs, of_head: &HeadTable, ahead: i32) -> f32 {
    let place = (of_head.zero + ahead).max(of_head.first).min(of_head.last);
    table.numbers[place as usize]
}
