//! Where the warps of a backward pass add to dQ, one tile of keys after the other.

use cubecl::prelude::*;

use super::asm::*;

/// Where a warp adds its dQ.
#[derive(CubeType)]
pub struct Chain {
    pub counters: u64,
    pub scratch: u64,
    /// Which half of the columns.
    pub part: u32,
    /// The first of the unit's eight queries of a step.
    pub query: u32,
    /// Steps the cube has done.
    pub done: RuntimeCell<u32>,
    /// The counter to be raised when the additions started last are done, and to what.
    pub open_counter: RuntimeCell<u32>,
    pub open_visits: RuntimeCell<u32>,
    /// Whether the products of the next step are of its tile's keys.
    pub started: RuntimeCell<u32>,
}

/// What the additions that the unit started last belong to is told that they are done: then they are in memory, and their
/// buffer is free.
#[cube]
pub fn close(chain: &Chain) {
    bulk_wait();
    if chain.open_visits.read() != 0 {
        post(
            chain.counters + u64::cast_from(chain.open_counter.read()) * 4,
            chain.open_visits.read(),
        );
    }
}
