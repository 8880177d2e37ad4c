//! The chains in which the warps of a backward pass add to dQ, one tile of keys after the other.
//!
//! With [`finishes`](BackwardTile::finishes), the last tile to visit 16 queries adds its part to the sums of those before it and writes dQ, so no later
//! launch reads the sums again. Otherwise [`finish`](super::backward_stats::finish) does that.

// Compile-time conditions stay separate from run-time ones.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use super::backward_loads::Lengths;
use super::gradient::row_position;
use super::tiles::BackwardTile;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, Listing};
use blocksparse::plan::{LAST_VISIT, NO_VISIT};

impl BackwardTile {
    /// Queries that share a counter.
    pub(super) fn counted(&self) -> usize {
        self.group.min(16)
    }

    /// Counters per 16 queries of a warp.
    pub(super) fn counters(&self) -> usize {
        16 / self.counted()
    }

    /// Whether the last visitor of queries may write their dQ. All queries of a warp must have the same visit, and there must be no second scratch.
    pub(super) fn may_finish(&self) -> bool {
        self.counters() == 1 && !self.apart
    }
}

/// State of a warp's chain.
#[derive(CubeType)]
pub struct Chain {
    pub counters: u64,
    /// Address of the counter from which tiles are drawn.
    pub tickets: u64,
    pub scratch: u64,
    /// Part of the columns.
    pub part: u32,
    /// First of the unit's eight queries of a step.
    pub query: u32,
    /// Steps that the cube has completed.
    pub done: RuntimeCell<u32>,
    /// The counter to raise when the last started additions are complete, and its new value.
    pub open_counter: RuntimeCell<u32>,
    pub open_visits: RuntimeCell<u32>,
    /// Whether the started products of the next step belong to its tile's keys.
    pub started: RuntimeCell<u32>,
}

/// A visit of the unit's queries.
#[derive(CubeType, Clone, Copy)]
pub struct Visit {
    /// The plan's word.
    pub word: u32,
    /// A value of the counter, read some time ago.
    pub seen: u32,
    /// Index of the counter.
    pub counter: u32,
    /// Place of the unit's first query among those of all heads.
    pub row: u32,
}

/// Returns the visit of the unit's queries from row `row` on, given the plan's word.
#[cube]
pub fn visit_of(chain: &Chain, word: u32, row: u32, #[comptime] t: BackwardTile) -> Visit {
    let counter = row / comptime!(t.counted() as u32) * comptime!(t.parts() as u32) + chain.part;
    let mut seen = 0u32;
    if unit() % 32 < comptime!(t.counters() as u32) {
        seen = peek(chain.counters + u64::cast_from(counter) * 4);
    }
    Visit {
        word,
        seen,
        counter,
        row,
    }
}

/// Posts the visit whose additions the unit started last, once they are in memory. Then their buffer is free.
///
/// The wait for bulk additions makes them visible to the unit. The fence and the post release them, and the next visitor's read of the counter and its
/// fence acquire them, as PTX's memory model requires. [`add_queries`] puts a proxy fence between that and its own addition.
#[cube]
pub fn close(chain: &Chain, #[comptime] t: BackwardTile) {
    bulk_wait();
    if comptime!(!t.unfenced) {
        // Releases the additions, and acquires those of the visits that `seen` counts.
        device_fence();
    }
    if chain.open_visits.read() != 0 {
        post(
            chain.counters + u64::cast_from(chain.open_counter.read()) * 4,
            chain.open_visits.read(),
        );
    }
}

/// Adds a warp's dQ of its 16 queries when its turn comes, or writes it if it is the last. With `is_zero`, it only takes its turn. All units must call it
/// together.
#[cube]
pub fn add_queries<C: Size>(
    grad_q: &mut [Vector<u32, Four>],
    dq: Vector<f32, C>,
    base: u32,
    chain: &Chain,
    visit: &Visit,
    listing: &Listing,
    lengths: &Lengths,
    scale: f32,
    #[comptime] is_zero: bool,
    #[comptime] t: BackwardTile,
) {
    // With fences, the caller has closed the visit of the previous step, so the buffer is free.
    let lane = unit() % 32;
    if comptime!(t.unfenced) {
        if lane < comptime!(t.counters() as u32) {
            close(chain, t);
        }
    }
    sync_warp();
    let turn = visit.word & NO_VISIT;
    let mut adds = turn != NO_VISIT;
    if comptime!(t.finishes) {
        adds = adds && visit.word & LAST_VISIT == 0;
    }
    chain.open_counter.store(visit.counter);
    chain.open_visits.store(select(adds, turn + 1, 0u32));
    let source = base
        + comptime!(t.dq_offset() as u32)
        + uniform(unit() / 32) * comptime!(2 * t.warp_eight_bytes() as u32);
    store_sixteen::<C>(dq, source + lane * 16, comptime!(t.warp_eight_bytes()));
    async_fence();
    sync_warp();
    if lane < comptime!(t.counters() as u32) {
        if turn != NO_VISIT && visit.seen != turn {
            wait_until(chain.counters + u64::cast_from(visit.counter) * 4, turn);
            if comptime!(!t.unfenced) {
                device_fence();
            }
        }
        if comptime!(!t.unfenced) {
            async_fence_global();
        }
        if adds {
            let bytes = comptime!(t.warp_eight_bytes() * 2 / t.counters());
            let target = sums_of(chain, visit.row, t);
            let source = source + lane * comptime!(bytes as u32);
            if turn == 0 {
                bulk_store(target, source, bytes, false);
            } else if comptime!(!is_zero) {
                bulk_store(target, source, bytes, true);
            }
        }
        bulk_commit();
    }
    if comptime!(t.finishes) {
        if uniform(visit.word & LAST_VISIT) != 0 {
            // The first lane has waited for the other tiles' sums.
            sync_warp();
            write_queries(
                grad_q, source, chain, visit.row, turn, listing, lengths, scale, t,
            );
        }
    }
}

/// Returns the address of the sums of the warp's columns and the eight queries at a row.
#[cube]
fn sums_of(chain: &Chain, row: u32, #[comptime] t: BackwardTile) -> u64 {
    chain.scratch
        + u64::cast_from(row / 16) * comptime!(2 * t.dq_eight_bytes() as u64)
        + u64::cast_from((chain.part * 2 + row % 16 / 8) * comptime!(t.warp_eight_bytes() as u32))
}

/// Writes dQ of the warp's 16 queries: its own part, which is in shared memory, plus the sums of earlier visits.
#[cube]
fn write_queries(
    grad_q: &mut [Vector<u32, Four>],
    own: u32,
    chain: &Chain,
    row: u32,
    turn: u32,
    listing: &Listing,
    lengths: &Lengths,
    scale: f32,
    #[comptime] t: BackwardTile,
) {
    let lane = unit() % 32;
    let row = row / 16 * 16;
    // Recomputed, because registers are short.
    let head = row / lengths.pitch;
    let sums = sums_of(chain, row, t) + u64::cast_from(lane * 16);
    for lower in 0..2u32 {
        let place = row % lengths.pitch + lane / 4 + 8 * lower;
        let target = row_position(place, listing, lengths.seq_q, t.residue);
        let first = (head * lengths.seq_q + target.position) as usize * comptime!(t.dim / 8);
        let offset = lower * comptime!(t.warp_eight_bytes() as u32);
        let own = own + lane * 16 + offset;
        let sums = sums + u64::cast_from(offset);
        let mut before = Array::<Vector<f32, Const<4>>>::new(comptime!(t.dq_cols() / 16));
        #[unroll]
        for i in 0..comptime!(t.dq_cols() / 16) {
            before[i] = Vector::zeroed();
            if turn != 0 {
                before[i] = peek_four(sums + comptime!(512 * i as u64));
            }
        }
        #[unroll]
        for i in 0..comptime!(t.dq_cols() / 32) {
            // Index of a vector of eight columns in the row.
            let eight =
                chain.part * comptime!(t.dq_cols() as u32 / 8) + comptime!(4 * i as u32) + lane % 4;
            let exists = target.exists && eight < comptime!(t.dim as u32 / 8);
            let to = first + eight as usize;
            let mut there = Vector::<u32, Four>::zeroed();
            if comptime!(t.carry) {
                if exists {
                    there = grad_q[to];
                }
                there = trade_four(there, lane);
            }
            let mut made = Vector::<u32, Four>::zeroed();
            #[unroll]
            for half in 0..2usize {
                let part = shared_load_four(own + comptime!(512 * (2 * i + half) as u32));
                let sum = before[comptime!(2 * i + half)] + part;
                #[unroll]
                for k in 0..2usize {
                    let mut low = sum.extract(comptime!(2 * k)) * scale;
                    let mut high = sum.extract(comptime!(2 * k + 1)) * scale;
                    let j = comptime!(2 * half + k);
                    if comptime!(t.carry) {
                        low += unpack(there.extract(j), false, t.half);
                        high += unpack(there.extract(j), true, t.half);
                    }
                    made.insert(j, pack(low, high, t.half));
                }
            }
            let made = trade_four(made, lane);
            if exists {
                grad_q[to] = made;
            }
        }
    }
}
