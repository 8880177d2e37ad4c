//! Single rows on their way to where wgmma reads them: in spans of 64 columns one behind the other, swizzled by 128 bytes, as TMA would put them, which
//! gathers no single rows on these devices.

use cubecl::prelude::*;

use crate::arch::sm80::{copy_of_row, wait_copies};
use crate::arch::sm90::*;

/// Pieces of 16 bytes of a row of a span.
const PIECES: u32 = 8;

/// Rows of which a warp copies a span at a time.
pub const ROWS_AT_A_TIME: usize = 4;

/// A matrix in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spans {
    pub rows: usize,
    /// A multiple of 64.
    pub dim: usize,
    /// Whether its rows are more than 4 GB apart in memory.
    pub far: bool,
}

impl Spans {
    /// Of rows in memory that are wherever they are.
    pub fn far(rows: usize, dim: usize) -> Self {
        let far = true;
        Self { rows, dim, far }
    }

    /// Bytes between spans.
    pub fn span_bytes(&self) -> usize {
        self.rows * ROW
    }

    /// Of products of these rows with others, over `depth` numbers of each.
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

/// The row of those that a warp copies at a time which is a lane's.
#[cube]
pub fn lane_row(lane: u32) -> u32 {
    lane / PIECES
}

/// Starts to copy the lane's piece of each span of a row, which lies at `position` of rows `stride` pieces of 16 bytes apart.
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

/// Waits for this unit's copies, and makes them known to wgmma.
#[cube]
pub fn own_copies() {
    wait_copies();
    async_fence();
}

/// Waits for the warp's copies and says at a barrier that wgmma may read them.
#[cube]
pub fn copies_are_there(bar: u32, lane: u32) {
    own_copies();
    sync_warp();
    if lane == 0 {
        barrier_arrive(bar);
    }
}
