//! Masks and stores of gradients, which both backward kernels share.

use cubecl::prelude::*;

use super::base::Base;
use super::rows::within;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, Listing};

/// Sets scores of pairs that are not allowed to −∞. The unit has rows `row` and `row + 8`, and columns `quad` and `quad + 1` of every group of eight.
#[cube]
pub fn mask<S: Size>(
    s_in: Vector<f32, S>,
    plan: &[u32],
    masks: usize,
    first_entry: usize,
    j: u32,
    row: u32,
    quad: u32,
    #[comptime] t: Base,
) -> Vector<f32, S> {
    let mut s = s_in;
    let infinity = f32::new(f32::NEG_INFINITY);
    let word_cols = comptime!(t.group.min(32));
    let row_words = comptime!(t.group.div_ceil(32));
    let entry = first_entry + (j * comptime!((t.cols / t.group * t.entry_words()) as u32)) as usize;
    #[unroll]
    for piece in 0..comptime!(t.cols / word_cols) {
        let col = comptime!(piece * word_cols);
        let id = plan[entry + comptime!(col / t.group * t.entry_words() + 1)];
        let at = masks
            + (id * comptime!((t.rows() * row_words) as u32) + row * comptime!(row_words as u32))
                as usize
            + comptime!(col % t.group / 32);
        let upper = plan[at] >> quad;
        let lower = plan[at + comptime!(8 * row_words)] >> quad;
        #[unroll]
        for eight in 0..comptime!(word_cols / 8) {
            #[unroll]
            for i in 0..2usize {
                let bit = comptime!(1u32 << (8 * eight + i));
                let at = comptime!(4 * (col / 8 + eight) + i);
                s.insert(at, select(upper & bit != 0, s.extract(at), infinity));
                let at = comptime!(4 * (col / 8 + eight) + i + 2);
                s.insert(at, select(lower & bit != 0, s.extract(at), infinity));
            }
        }
    }
    s
}

/// The two rows that a unit stores, eight rows apart.
#[derive(CubeType, Clone, Copy)]
pub struct StoredRows {
    /// Their places, as `listing` lists them.
    pub place: u32,
    pub place8: u32,
    pub listing: Listing,
    /// Number of positions.
    pub len: u32,
    /// The unit's lane.
    pub lane: u32,
}

/// Stores a unit's rows times a factor. The output begins at vector `start`, and the first position is its row `first`. All units must call it together.
#[cube]
pub fn store_rows<O: Size>(
    out: &mut [Vector<u32, Four>],
    acc: &Vector<f32, O>,
    start: u32,
    first: u32,
    rows: &StoredRows,
    factor: f32,
    #[comptime] t: Base,
) {
    let fours = comptime!(t.dim.div_ceil(32));
    let lane = rows.lane;
    let upper = target(rows.place, start, first, rows, t);
    let lower = target(rows.place8, start, first, rows, t);
    let mut before = Array::<Vector<u32, Four>>::new(comptime!(2 * fours));
    if comptime!(t.carry) {
        // Load all of them first, because loads would wait for stores in between.
        #[unroll]
        for i in 0..fours {
            before[i] = read(&out[..], &upper, lane, i, t);
            before[comptime!(fours + i)] = read(&out[..], &lower, lane, i, t);
        }
    }
    #[unroll]
    for i in 0..fours {
        let made = four::<O>(acc, &before, 0usize, i, lane, factor, t);
        if upper.exists && within(lane, i, t.dim) {
            out[upper.at + comptime!(4 * i)] = made;
        }
        let made = four::<O>(acc, &before, 1usize, i, lane, factor, t);
        if lower.exists && within(lane, i, t.dim) {
            out[lower.at + comptime!(4 * i)] = made;
        }
    }
}

/// Location of a row for a unit, which has 16 of every 64 bytes.
#[derive(CubeType, Clone, Copy)]
struct Target {
    at: usize,
    exists: bool,
}

#[cube]
fn target(place: u32, start: u32, first: u32, rows: &StoredRows, #[comptime] t: Base) -> Target {
    let found = row_position(place, &rows.listing, rows.len, t.residue);
    let row = (first + found.position) as usize * comptime!(t.dim / 8);
    Target {
        at: start as usize + row + (rows.lane % 4) as usize,
        exists: found.exists,
    }
}

/// A position that may not exist.
#[derive(CubeType, Clone, Copy)]
pub struct RowPosition {
    pub position: u32,
    pub exists: bool,
}

/// Returns the position at a place, if it is below `len`.
#[cube]
pub fn row_position(
    place: u32,
    listing: &Listing,
    len: u32,
    #[comptime] residue: bool,
) -> RowPosition {
    let mut position = place;
    let mut exists = place < len;
    if comptime!(residue) {
        let class = place / listing.class_len as u32;
        position = place % listing.class_len as u32 * listing.stride as u32 + class;
        exists = class < listing.stride as u32 && position < len;
    }
    RowPosition { position, exists }
}

#[cube]
fn read(
    out: &[Vector<u32, Four>],
    row: &Target,
    lane: u32,
    #[comptime] i: usize,
    #[comptime] t: Base,
) -> Vector<u32, Four> {
    let mut four = Vector::<u32, Four>::zeroed();
    if row.exists && within(lane, i, t.dim) {
        four = out[row.at + comptime!(4 * i)];
    }
    four
}

/// Returns the `i`-th 16 bytes that a unit stores of its upper or lower row.
#[cube]
fn four<O: Size>(
    acc: &Vector<f32, O>,
    before: &Array<Vector<u32, Four>>,
    #[comptime] lower: usize,
    #[comptime] i: usize,
    lane: u32,
    factor: f32,
    #[comptime] t: Base,
) -> Vector<u32, Four> {
    let mut own = Vector::<u32, Four>::zeroed();
    let mut sum = Vector::<u32, Four>::zeroed();
    if comptime!(t.carry) {
        sum = trade_four(before[comptime!(lower * t.dim.div_ceil(32) + i)], lane);
    }
    #[unroll]
    for j in 0..4usize {
        let n = comptime!(16 * i + 4 * j + 2 * lower);
        let mut low = acc.extract(n) * factor;
        let mut high = acc.extract(comptime!(n + 1)) * factor;
        if comptime!(t.carry) {
            low += unpack(sum.extract(j), false, t.half);
            high += unpack(sum.extract(j), true, t.half);
        }
        own.insert(j, pack(low, high, t.half));
    }
    trade_four(own, lane)
}
