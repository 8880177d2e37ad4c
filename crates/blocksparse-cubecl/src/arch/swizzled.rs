//! Copies of single rows to shared memory for wgmma: in consecutive spans of 64 columns with the 128-byte swizzle, as TMA would store them. TMA on these
//! devices cannot gather single rows.

use cubecl::prelude::*;

use crate::arch::sm80::{copy_of_row, wait_copies};
use crate::arch::sm90::*;

/// 16-byte pieces per row of a span.
const PIECES: u32 = 8;

/// Rows of a span that a warp copies at a time.
pub const ROWS_AT_A_TIME: usize = 4;

/// Layout of a matrix in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spans {
    pub rows: usize,
    /// A multiple of 64.
    pub dim: usize,
    /// Whether its rows in global memory are more than 4 GB apart.
    pub far: bool,
}

impl Spans {
    /// Returns a matrix whose rows may be any distance apart in global memory.
    pub fn far(rows: usize, dim: usize) -> Self {
        let far = true;
        Self { rows, dim, far }
    }

    /// Bytes between spans.
    pub fn span_bytes(&self) -> usize {
        self.rows * ROW
    }

    /// Returns the shape of products of these rows with other rows, over `depth` elements of each.
    pub fn product(&self, others: Spans, half: Half, depth: usize) -> ProductShape {
        ProductShape {
            half,
            fp8: false,
            depth,
            a_span: self.span_bytes(),
            b_span: others.span_bytes(),
        }
    }

    pub fn bytes(&self) -> usize {
        self.span_bytes() * (self.dim / ROW_ELEMENTS)
    }
}

/// Returns which of the rows that a warp copies at a time is the lane's.
#[cube]
pub fn lane_row(lane: u32) -> u32 {
    lane / PIECES
}

/// Starts the copy of the lane's piece of each span of a row. The row is at `position` among rows that are `stride` pieces of 16 bytes apart.
#[cube]
pub fn copy_row(
    matrix: u32,
    row: u32,
    first: u64,
    position: u32,
    stride: u64,
    lane: u32,
    #[comptime] of: Spans,
) {
    let piece = lane % PIECES;
    let target = matrix + row * comptime!(ROW as u32) + ((piece ^ (row % 8)) * 16);
    let source = first + u64::cast_from(piece * 16);
    #[unroll]
    for span in 0..comptime!(of.dim / ROW_ELEMENTS) {
        let place = target + comptime!((span * of.span_bytes()) as u32);
        let from = source + comptime!((span * ROW) as u64);
        copy_of_row(place, from, position, stride, of.far);
    }
}

/// Waits for this unit's copies, and makes them visible to wgmma.
#[cube]
pub fn own_copies() {
    wait_copies();
    async_fence();
}

/// Waits for the warp's copies, and arrives at the barrier after which wgmma may read them.
#[cube]
pub fn copies_are_there(bar: u32, lane: u32) {
    own_copies();
    sync_warp();
    if lane == 0 {
        barrier_arrive(bar);
    }
}
