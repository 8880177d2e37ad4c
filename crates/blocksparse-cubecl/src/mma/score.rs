//! From products to scores: softcap, biases (ALiBi, bias tensor, table of distances), masks.

use cubecl::prelude::*;

use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::Four;
use crate::shared::distances::{HeadTable, TableArgs, distance_bias, no_table, table_of};
use crate::shared::softcap::{any_far, no_products, softcap_products, with_products};

/// Strides of a contiguous bias in bytes. The stride of a dimension of length 1 is 0.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct BiasStrides {
    /// Stride of batch entries.
    pub batch: u64,
    /// Stride of heads.
    pub head: u64,
    /// Stride of queries.
    pub row: u32,
}

/// Biases of scores as kernel arguments.
#[derive(CubeType, CubeLaunch)]
pub struct BiasArgs {
    /// Bias tensor `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, contiguous, in words.
    pub bias: ComptimeOption<Box<[u32]>>,
    /// Strides of the bias tensor.
    pub strides: BiasStrides,
    /// Table of distances.
    pub table: ComptimeOption<TableArgs>,
}

/// Biases of a head.
#[derive(CubeType, Clone, Copy)]
pub struct Biases {
    /// ALiBi slope.
    pub slope: f32,
    /// Added to a row's position to get the column at distance 0.
    pub shift: u32,
    /// Address of the head's bias.
    pub address: u64,
    /// Stride of its queries in bytes.
    pub row: u32,
    /// Table of distances.
    pub table: HeadTable,
}

/// Returns the biases of a head with this slope.
#[cube]
pub fn biases_of_head(
    biases: &BiasArgs,
    slope: f32,
    shift: u32,
    batch: u32,
    head: u32,
    #[comptime] t: Tile,
) -> Biases {
    Biases {
        slope,
        shift,
        address: bias_address(&biases.bias, &biases.strides, batch, head, t),
        row: biases.strides.row,
        table: table_of_head(&biases.table, head, t),
    }
}

/// Returns the address of a head's bias, or 0 without one.
#[cube]
fn bias_address(
    bias: &ComptimeOption<Box<[u32]>>,
    strides: &BiasStrides,
    batch: u32,
    head: u32,
    #[comptime] t: Tile,
) -> u64 {
    let mut at = u64::cast_from(0u32);
    if comptime!(t.score.bias) {
        let bias = bias.as_ref().unwrap();
        at = address::<u32>(&bias[..])
            + u64::cast_from(batch) * strides.batch
            + u64::cast_from(head) * strides.head;
    }
    at
}

/// Returns a head's table of distances.
#[cube]
fn table_of_head(table: &ComptimeOption<TableArgs>, head: u32, #[comptime] t: Tile) -> HeadTable {
    if comptime!(t.score.relative) {
        table_of(table.as_ref().unwrap(), head)
    } else {
        no_table()
    }
}

/// Turns products into scores: multiplies them by `factor`, unless they are already softcapped, and adds ALiBi's bias and the bias tensor. `rows` and
/// `cols` are the addresses of the positions of the unit's first row and first column in the step. In a loop over `columns`, rows are keys.
#[cube]
pub fn add_biases(
    s: &mut Array<Vector<f32, Four>>,
    biases: &Biases,
    factor: f32,
    rows: u32,
    cols: u32,
    #[comptime] t: Tile,
) {
    let tiles = comptime!(t.warp_tiles);
    let bytes = comptime!(t.element.bytes() as u32);
    // Distances are differences of positions relative to the unit's first row. f32 holds those exactly, or as exactly as distances.
    let origin = shared_load(rows);
    let mut row_distances = Array::<f32>::new(comptime!(if t.score.alibi { 2 * tiles } else { 1 }));
    let mut row_addresses = Array::<u64>::new(comptime!(if t.score.bias { 2 * tiles } else { 1 }));
    let mut row_exists = Array::<bool>::new(comptime!(if t.score.bias { 2 * tiles } else { 1 }));
    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        let row = shared_load(rows + comptime!(i as u32 * ROW_PAIR * 4));
        if comptime!(t.score.alibi) {
            row_distances[i] = distance(row, origin);
        }
        if comptime!(t.score.bias) {
            let mut stride = biases.row;
            if comptime!(t.columns()) {
                stride = bytes.runtime();
            }
            row_addresses[i] = biases.address + u64::cast_from(row) * u64::cast_from(stride);
            row_exists[i] = row != comptime!(NOWHERE);
        }
    }
    #[unroll]
    for n in 0..comptime!(t.eights()) {
        let positions = shared_load_pair(cols + comptime!(n as u32 * 32));
        #[unroll]
        for j in 0..2usize {
            let col = positions.extract(j);
            let col_distance = distance(col, origin + biases.shift);
            let mut stride = bytes.runtime();
            if comptime!(t.columns()) {
                stride = biases.row;
            }
            let offset = u64::cast_from(col) * u64::cast_from(stride);
            let exists = col != comptime!(NOWHERE);
            #[unroll]
            for i in 0..comptime!(2 * tiles) {
                let at = comptime!(i / 2 * t.eights() + n);
                let place = comptime!(i % 2 * 2 + j);
                let mut four = s[at];
                let mut score = four.extract(place);
                if comptime!(!t.score.softcap) {
                    score *= factor;
                }
                if comptime!(t.score.bias) {
                    score += load_number(
                        row_addresses[i] + offset,
                        u32::cast_from(exists && row_exists[i]),
                        t.element,
                    );
                }
                if comptime!(t.score.alibi) {
                    let apart = (row_distances[i] - col_distance).abs();
                    score = multiply_add(-biases.slope, apart, score);
                }
                four.insert(place, score);
                s[at] = four;
            }
        }
    }
}

/// Adds biases from the table of distances to scores, with addresses as in [`add_biases`].
#[cube]
pub fn add_distances(
    s: &mut Array<Vector<f32, Four>>,
    table: &ComptimeOption<TableArgs>,
    biases: &Biases,
    rows: u32,
    cols: u32,
    #[comptime] t: Tile,
) {
    if comptime!(t.score.relative) {
        let table = table.as_ref().unwrap();
        let tiles = comptime!(t.warp_tiles);
        let mut places = Array::<u32>::new(comptime!(2 * tiles));
        #[unroll]
        for i in 0..comptime!(2 * tiles) {
            let row = shared_load(rows + comptime!(i as u32 * ROW_PAIR * 4));
            places[i] = row + biases.shift;
        }
        #[unroll]
        for n in 0..comptime!(t.eights()) {
            let positions = shared_load_pair(cols + comptime!(n as u32 * 32));
            #[unroll]
            for j in 0..2usize {
                let col = positions.extract(j);
                #[unroll]
                for i in 0..comptime!(2 * tiles) {
                    let at = comptime!(i / 2 * t.eights() + n);
                    let place = comptime!(i % 2 * 2 + j);
                    let mut ahead = i32::cast_from(col - places[i]);
                    if comptime!(t.columns()) {
                        ahead = i32::cast_from(places[i] - col);
                    }
                    let mut four = s[at];
                    let bias = distance_bias(table, &biases.table, ahead);
                    four.insert(place, four.extract(place) + bias);
                    s[at] = four;
                }
            }
        }
    }
}

/// Returns the signed distance from `origin` to `position`.
#[cube]
fn distance(position: u32, origin: u32) -> f32 {
    f32::cast_from(i32::cast_from(position - origin))
}

/// Softcaps scores.
#[cube]
pub fn cap(s: &mut Array<Vector<f32, Four>>, softcap: f32, cap_scale: f32, #[comptime] t: Tile) {
    let fours = comptime!(t.warp_tiles * t.eights());
    let mut largest = no_products();
    #[unroll]
    for n in 0..fours {
        with_products::<Four>(&mut largest, s[n]);
    }
    if any_far(&largest, cap_scale) {
        cap_fours(s, softcap, cap_scale, false, t);
    } else {
        cap_fours(s, softcap, cap_scale, true, t);
    }
}

#[cube]
fn cap_fours(
    s: &mut Array<Vector<f32, Four>>,
    softcap: f32,
    cap_scale: f32,
    #[comptime] near: bool,
    #[comptime] t: Tile,
) {
    #[unroll]
    for n in 0..comptime!(t.warp_tiles * t.eights()) {
        let mut four = s[n];
        softcap_products::<Four>(&mut four, softcap, cap_scale, near);
        s[n] = four;
    }
}

/// Sets scores of pairs that are not allowed to −∞. `row` is the unit's first row, `entry` the word of the step's first entry.
#[cube]
pub fn mask(
    s: &mut Array<Vector<f32, Four>>,
    plan: &[u32],
    masks: usize,
    entry: usize,
    row: u32,
    quad: u32,
    #[comptime] t: Tile,
) {
    let infinity = f32::new(f32::NEG_INFINITY);
    let word_cols = comptime!(t.group.min(32));
    let row_words = comptime!(t.group.div_ceil(32));
    #[unroll]
    for piece in 0..comptime!(t.cols / word_cols) {
        let col = comptime!(piece * word_cols);
        let id = plan[entry + comptime!(col / t.group * 2 + 1)];
        let at = masks
            + (id * comptime!((t.rows() * row_words) as u32) + row * comptime!(row_words as u32))
                as usize
            + comptime!(col % t.group / 32);
        #[unroll]
        for m in 0..comptime!(t.warp_tiles) {
            let upper = plan[at + comptime!(16 * m * row_words)] >> quad;
            let lower = plan[at + comptime!((16 * m + ROW_PAIR as usize) * row_words)] >> quad;
            #[unroll]
            for eight in 0..comptime!(word_cols / 8) {
                let n = comptime!(m * t.eights() + col / 8 + eight);
                let mut four = s[n];
                #[unroll]
                for i in 0..2usize {
                    let bit = comptime!(1u32 << (8 * eight + i));
                    four.insert(i, select(upper & bit != 0, four.extract(i), infinity));
                    let i = comptime!(i + 2);
                    four.insert(i, select(lower & bit != 0, four.extract(i), infinity));
                }
                s[n] = four;
            }
        }
    }
}
