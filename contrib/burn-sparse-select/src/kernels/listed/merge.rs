//! Merges the parts of a row's output, one per selected block, by their lse, and optionally with attention to other keys. Parts of a gradient are summed and
//! accumulated onto the gradient.

// Compile-time conditions stay separate from runtime ones.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::shared::addressing::Four;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MergeShape {
    /// Type of the outputs.
    pub half: Half,
    /// Width of a row.
    pub dim: usize,
    /// Number of heads that share a list.
    pub heads: usize,
    /// True if the outputs hold attention to other keys.
    pub carry: bool,
    /// True for parts of a gradient, which have no lse.
    pub backward: bool,
}

/// Rows of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Rows {
    /// First list over all batch entries and KV heads, and number of lists.
    pub first_list: u32,
    pub lists: u32,
    /// Number of queries of a list, and maximum number of blocks that each selects.
    pub seq_q: u32,
    pub most: u32,
    /// Number of places of a list.
    pub places: u32,
}

/// Merges the parts of each row. `places` `[lists, seq_q, most]` holds the place of each selection, negative for empty entries. `parts` and `logs` are as
/// [`by_block`](crate::kernels::listed::warpgroups::block::by_block) writes them. A unit has eight elements of a row.
#[cube(launch_unchecked)]
pub fn merge(
    parts: &[Vector<u32, Four>],
    logs: &[f32],
    places: &[i32],
    out: &mut [Vector<u32, Four>],
    lse: &mut [f32],
    rows: Rows,
    #[comptime] t: MergeShape,
) {
    let (pieces, heads) = comptime!(((t.dim / 8) as u32, t.heads as u32));
    let unit = ABSOLUTE_POS as u32;
    let is_there = unit < rows.lists * rows.seq_q * comptime!(heads * pieces);
    // Surplus units repeat an existing row and do not write it.
    let unit = select(is_there, unit, unit % pieces);
    let (piece, row) = (unit % pieces, unit / pieces);
    let (head, of_list) = (row % heads, row / heads);
    let (query, list) = (of_list % rows.seq_q, of_list / rows.seq_q);
    let own = ((rows.first_list + list) * heads + head) * rows.seq_q + query;
    let at = own as usize * pieces as usize + piece as usize;
    let chosen = ((rows.first_list + list) * rows.seq_q + query) * rows.most;
    let first = list * rows.places;

    let mut before = f32::new(f32::NEG_INFINITY);
    if comptime!(t.carry && !t.backward) {
        before = lse[own as usize];
    }
    let mut top = before;
    if comptime!(!t.backward) {
        for j in 0..rows.most {
            let place = places[(chosen + j) as usize];
            if place >= 0i32 {
                top = larger(top, logs[((first + place as u32) * heads + head) as usize]);
            }
        }
    }
    let mut sum = f32::new(0.0);
    let mut sums = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        sums[i] = f32::new(0.0);
    }
    // Avoids −∞ − (−∞) for a row without keys.
    let is_seen = comptime!(t.backward).runtime() || top > f32::new(f32::NEG_INFINITY);
    if comptime!(t.carry) {
        if is_seen {
            let weight = weight_of(before, top, t);
            sum = add_part(&mut sums, out[at], weight, sum, t.half);
        }
    }
    if is_seen {
        for j in 0..rows.most {
            let place = places[(chosen + j) as usize];
            if place >= 0i32 {
                let part = (first + place as u32) * heads + head;
                let mut log = top;
                if comptime!(!t.backward) {
                    log = logs[part as usize];
                }
                let weight = weight_of(log, top, t);
                let four = parts[part as usize * pieces as usize + piece as usize];
                sum = add_part(&mut sums, four, weight, sum, t.half);
            }
        }
    }
    let mut inverse = f32::new(1.0);
    let mut log = f32::new(f32::NEG_INFINITY);
    if comptime!(!t.backward) {
        inverse = f32::new(0.0);
        if sum > 0.0f32 {
            inverse = reciprocal(sum);
            log = top + log2(sum) * comptime!(std::f32::consts::LN_2);
        }
    }
    // All units of a row have read its lse before one overwrites it.
    sync_warp();
    if is_there {
        let mut four = Vector::<u32, Four>::zeroed();
        #[unroll]
        for i in 0..4usize {
            let low = sums[comptime!(2 * i)] * inverse;
            let high = sums[comptime!(2 * i + 1)] * inverse;
            four.insert(i, pack(low, high, t.half));
        }
        out[at] = four;
        if comptime!(!t.backward) {
            if piece == 0 {
                lse[own as usize] = log;
            }
        }
    }
}

/// Returns the weight of a part with this lse, relative to the highest.
#[cube]
fn weight_of(log: f32, top: f32, #[comptime] t: MergeShape) -> f32 {
    if comptime!(t.backward) {
        f32::new(1.0)
    } else {
        exp2((log - top) * comptime!(std::f32::consts::LOG2_E))
    }
}

/// Adds eight elements of a part, and returns the sum of weights.
#[cube]
fn add_part(
    sums: &mut Array<f32>,
    four: Vector<u32, Four>,
    weight: f32,
    sum: f32,
    #[comptime] half: Half,
) -> f32 {
    #[unroll]
    for i in 0..4usize {
        let word = four.extract(i);
        let (low, high) = comptime!((2 * i, 2 * i + 1));
        sums[low] += weight * unpack(word, false, half);
        sums[high] += weight * unpack(word, true, half);
    }
    sum + weight
}
