//! Biases of distances on the tensor-core tiers.

use cubecl::prelude::*;

/// A table of biases of distances, as a kernel gets it.
#[derive(CubeType, CubeLaunch)]
pub struct TableArgs {
    /// `[heads or 1, 2 · reach + 1]`
    pub numbers: Box<[f32]>,
    /// Elements of a head: 0 if heads share them.
    pub head: u32,
    /// The largest distance that has a number of its own.
    pub reach: u32,
}

/// Which numbers of a table are a head's.
#[derive(CubeType, Clone, Copy)]
pub struct HeadTable {
    first: i32,
    /// That of distance 0.
    zero: i32,
    last: i32,
}

/// The elements of a head.
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

/// Those of a head without biases of distances.
#[cube]
pub fn no_table() -> HeadTable {
    HeadTable {
        first: 0i32,
        zero: 0i32,
        last: 0i32,
    }
}

/// The bias of a key so far `ahead` of its query. Whatever the distance, it is one of the head's.
#[cube]
pub fn distance_bias(table: &TableArgs, of_head: &HeadTable, ahead: i32) -> f32 {
    let place = (of_head.zero + ahead).max(of_head.first).min(of_head.last);
    table.numbers[place as usize]
}
