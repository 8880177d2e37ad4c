//! Options of scores besides products: ALiBi, the bias tensor, the table of distances, and the arguments of dropout.
//!
//! All of them depend on positions. A unit has two rows of a step's scores, `r` and `r + 8`, and two adjacent columns of every group of eight. In the order
//! of wgmma's result, its elements belong to
//!
//! ```text
//! element 4 · n + i      row r + 8 · (i / 2), column 8 · n + 2 · (lane mod 4) + i mod 2
//! ```
//!
//! The columns of a group of eight are consecutive places of one block and one residue class. In a loop over columns, rows are keys.

use cubecl::prelude::*;

use super::base::Base;
use super::rows::own_places;
use crate::arch::sm90::*;
use crate::shared::addressing::{Listing, PlanWords};
use crate::shared::distances::{HeadTable, TableArgs, distance_bias, no_table, table_of};
use crate::shared::dropout::Mask;
use crate::shared::softcap::{any_far, no_products, softcap_products, with_products};

/// The options of a call as kernel arguments.
#[derive(CubeType, CubeLaunch)]
pub struct PairArgs {
    /// ALiBi slopes, `[heads]`.
    pub slopes: ComptimeOption<Box<[f32]>>,
    /// Bias tensor `[batch or 1, heads or 1, seq_q or 1, seq_kv]`, contiguous, as bits.
    pub bias: ComptimeOption<Box<[u16]>>,
    /// Table of distances.
    pub table: ComptimeOption<TableArgs>,
    /// Scalars of the options.
    pub pairs: PairScalars,
}

/// Options of a call that are the same for all pairs.
#[derive(CubeType, CubeLaunch)]
pub struct PairScalars {
    /// Number of queries.
    pub queries: u32,
    /// Number of keys.
    pub keys: u32,
    /// Stride of the bias's batch entries in bytes.
    pub bias_batch: u64,
    /// Stride of its heads in bytes.
    pub bias_head: u64,
    /// Stride of its queries in bytes.
    pub bias_row: u32,
    /// The generator of dropout.
    pub mask: Mask,
    /// Factor of the weights that dropout keeps.
    pub factor: f32,
}

/// The options of a head.
#[derive(CubeType, Clone, Copy)]
pub struct HeadOptions {
    /// Batch entry.
    pub batch: u32,
    /// Query head.
    pub head: u32,
    /// Change of scores per unit of distance.
    per_distance: f32,
    /// Address of the head's bias.
    bias: u64,
    /// Its table of distances.
    table: HeadTable,
}

#[cube]
pub fn options_of(
    args: &ComptimeOption<PairArgs>,
    batch: u32,
    head: u32,
    #[comptime] t: Base,
) -> HeadOptions {
    let mut per_distance = f32::new(0.0);
    let mut bias = 0u64;
    if comptime!(t.score.alibi) {
        let args = args.as_ref().unwrap();
        per_distance = -args.slopes.as_ref().unwrap()[head as usize];
    }
    if comptime!(t.score.bias) {
        let args = args.as_ref().unwrap();
        bias = global_address::<u16>(&args.bias.as_ref().unwrap()[..])
            + u64::cast_from(batch) * args.pairs.bias_batch
            + u64::cast_from(head) * args.pairs.bias_head;
    }
    let table = if comptime!(t.score.relative) {
        table_of(args.as_ref().unwrap().table.as_ref().unwrap(), head)
    } else {
        no_table()
    };
    HeadOptions {
        batch,
        head,
        per_distance,
        bias,
        table,
    }
}

/// Positions of the unit's rows.
#[derive(CubeType, Clone, Copy)]
pub struct UnitRows {
    /// Position of the upper row.
    pub upper: u32,
    /// Position of the row eight below.
    pub lower: u32,
}

/// A position beyond every sequence, small enough that a step's columns do not overflow.
const NOWHERE: i64 = 1 << 30;

/// Returns the position at a place.
#[cube]
pub fn position_at(place: u32, listing: &Listing, #[comptime] residue: bool) -> u32 {
    let mut position = place;
    if comptime!(residue) {
        let class = place / listing.class_len as u32;
        position = place % listing.class_len as u32 * listing.stride as u32 + class;
        if class >= listing.stride as u32 {
            position = u32::new(NOWHERE);
        }
    }
    position
}

/// Returns the positions of the unit's rows, given their places.
#[cube]
pub fn unit_rows(upper: u32, lower: u32, listing: &Listing, #[comptime] t: Base) -> UnitRows {
    UnitRows {
        upper: position_at(upper, listing, t.residue),
        lower: position_at(lower, listing, t.residue),
    }
}

/// Returns the positions of the unit's rows of a tile, or 0 if nothing depends on them.
#[cube]
pub fn rows_of_unit(plan: &PlanWords, rows: u32, #[comptime] t: Base) -> UnitRows {
    let mut upper = 0u32;
    let mut lower = 0u32;
    if comptime!(t.score.positions()) {
        let row = unit() / 32 * 16 + unit() % 32 / 4;
        let places = own_places(&plan.words[..], rows, row, comptime!(t.own_shape()));
        upper = places.upper;
        lower = places.lower;
    }
    unit_rows(upper, lower, &plan.listing, t)
}

/// Softcaps products if `capped`: `softcap · tanh x` with `x = s · cap_scale / 2 log2 e`.
#[cube]
pub fn cap<S: Size>(
    s: &mut Vector<f32, S>,
    softcap: f32,
    cap_scale: f32,
    #[comptime] capped: bool,
) {
    if comptime!(capped) {
        let mut largest = no_products();
        with_products::<S>(&mut largest, *s);
        if any_far(&largest, cap_scale) {
            softcap_products::<S>(s, softcap, cap_scale, false);
        } else {
            softcap_products::<S>(s, softcap, cap_scale, true);
        }
    }
}

/// Multiplies weights by the derivative of the softcap, `1 − (s / softcap)²`, for scores that are softcapped or −∞. A division per pair would take ten
/// instructions.
#[cube]
pub fn slope_weights<S: Size>(
    p: Vector<f32, S>,
    s: Vector<f32, S>,
    softcap: f32,
    #[comptime] capped: bool,
) -> Vector<f32, S> {
    let mut sloped = p;
    if comptime!(capped) {
        let inverse = reciprocal(softcap);
        #[unroll]
        for i in 0..S::value() {
            let ratio = s.extract(i) * inverse;
            let slope = multiply_add(-ratio, ratio, f32::new(1.0)).max(0.0);
            sloped.insert(i, p.extract(i) * slope);
        }
    }
    sloped
}

/// Turns products, or softcapped products, into scores: `scale · s − slope · |distance| + bias + table[distance]`, with the last query aligned to the last
/// key. The step's first entry is at word `entry`.
#[cube]
pub fn add_biases<S: Size>(
    s_in: Vector<f32, S>,
    scale: f32,
    args: &ComptimeOption<PairArgs>,
    of_head: &HeadOptions,
    rows: &UnitRows,
    plan: &PlanWords,
    entry: usize,
    #[comptime] t: Base,
) -> Vector<f32, S> {
    let mut s = s_in;
    if comptime!(t.score.biased()) {
        let pairs = &args.as_ref().unwrap().pairs;
        let mut row_len = pairs.queries;
        let mut col_len = pairs.keys;
        if comptime!(t.columns()) {
            row_len = pairs.keys;
            col_len = pairs.queries;
        }
        let mut stride = 1u32;
        if comptime!(t.residue) {
            stride = plan.listing.stride as u32;
        }
        let quad = unit() % 4 * 2 * stride;
        let behind = i32::cast_from(col_len) - i32::cast_from(row_len) - i32::cast_from(quad);
        let upper = bias_row(rows.upper, row_len, col_len, of_head, pairs, t);
        let lower = bias_row(rows.lower, row_len, col_len, of_head, pairs, t);
        #[unroll]
        for part in 0..comptime!(t.cols / 32) {
            let mut upper_words = Vector::<u32, Const<4>>::zeroed();
            let mut lower_words = Vector::<u32, Const<4>>::zeroed();
            if comptime!(t.wide_bias) {
                let place = wide_place(&plan.words[..], entry, part, t);
                upper_words = read_wide(&upper, place, t);
                lower_words = read_wide(&lower, place, t);
            }
            #[unroll]
            for eight in 0..4usize {
                let col = comptime!(32 * part + 8 * eight);
                let place = plan.words[entry + comptime!(col / t.group * t.entry_words())]
                    * comptime!(t.group as u32);
                let first = position_at(place, &plan.listing, t.residue);
                #[unroll]
                for i in 0..4usize {
                    let number = comptime!(4 * (4 * part + eight) + i);
                    let offset = comptime!((col % t.group + i % 2) as u32) * stride;
                    let mut row = upper.position;
                    let mut words = upper_words;
                    if comptime!(i >= 2) {
                        row = lower.position;
                        words = lower_words;
                    }
                    let mut sum = f32::new(0.0);
                    if comptime!(t.wide_bias) {
                        let word = bias_word(words.extract(eight), t);
                        sum = unpack(word, comptime!(i % 2 == 1), t.half);
                    } else if comptime!(t.score.bias) {
                        let col = first + quad + offset;
                        if comptime!(i < 2) {
                            sum = read_bias(&upper, col, pairs, t);
                        } else {
                            sum = read_bias(&lower, col, pairs, t);
                        }
                    }
                    if comptime!(t.score.alibi || t.score.relative) {
                        let nearest = i32::cast_from(row) + behind - i32::cast_from(first);
                        if comptime!(t.score.relative) {
                            let mut ahead = i32::cast_from(offset) - nearest;
                            if comptime!(t.columns()) {
                                ahead = nearest - i32::cast_from(offset);
                            }
                            let table = args.as_ref().unwrap().table.as_ref().unwrap();
                            sum += distance_bias(table, &of_head.table, ahead);
                        }
                        if comptime!(t.score.alibi) {
                            let distance = f32::cast_from(nearest) - f32::cast_from(offset);
                            sum = multiply_add(distance.abs(), of_head.per_distance, sum);
                        }
                    }
                    if comptime!(t.score.softcap) {
                        sum += s.extract(number);
                    } else {
                        sum = multiply_add(s.extract(number), scale, sum);
                    }
                    s.insert(number, sum);
                }
            }
        }
    }
    s
}

/// The bias of one of the unit's rows.
#[derive(CubeType, Clone, Copy)]
struct BiasRow {
    position: u32,
    /// Address of its first column.
    begin: u64,
    /// End column, exclusive: 0 for a row beyond the sequence.
    end: u32,
    /// Stride of queries in bytes.
    query: u32,
}

#[cube]
fn bias_row(
    position: u32,
    row_len: u32,
    col_len: u32,
    of_head: &HeadOptions,
    pairs: &PairScalars,
    #[comptime] t: Base,
) -> BiasRow {
    let mut step = u64::cast_from(pairs.bias_row);
    if comptime!(t.columns()) {
        step = 2u64;
    }
    BiasRow {
        position,
        begin: of_head.bias + u64::cast_from(position) * step,
        end: select(position < row_len, col_len, 0u32),
        query: pairs.bias_row,
    }
}

/// Returns the bias of a row and the column at position `col`, or 0 beyond the sequences.
#[cube]
fn read_bias(row: &BiasRow, col: u32, pairs: &PairScalars, #[comptime] t: Base) -> f32 {
    let mut step = 2u64;
    if comptime!(t.columns()) {
        step = u64::cast_from(pairs.bias_row);
    }
    read_half(row.begin + u64::cast_from(col) * step, col, row.end, t.half)
}

/// Returns the place of the eight of 32 columns that a lane reads: the first of them. In a loop over columns, columns are queries, and it is the one whose
/// bias the lane reads.
#[cube]
fn wide_place(plan: &[u32], entry: usize, #[comptime] part: usize, #[comptime] t: Base) -> u32 {
    let lane = unit() % 32;
    let group = comptime!(t.group as u32);
    let col = comptime!(32 * part as u32) + lane % 4 * 8;
    let at = entry + (col / group * comptime!(t.entry_words() as u32)) as usize;
    let mut place = plan[at] * group + col % group;
    if comptime!(t.columns()) {
        place += lane / 4;
    }
    place
}

/// Reads 16 bytes of bias, which are one query and eight keys, of one of four groups of eight columns. Exchanges them for the unit's own two numbers of all
/// four groups, or for those of [`bias_word`].
#[cube]
fn read_wide(row: &BiasRow, place: u32, #[comptime] t: Base) -> Vector<u32, Const<4>> {
    let lane = unit() % 32;
    let mut at = row.begin;
    if comptime!(t.columns()) {
        // The keys are those of eight rows, from the first one on.
        at += u64::cast_from(place) * u64::cast_from(row.query);
        at -= u64::cast_from(lane / 4 * 2);
    } else {
        at += u64::cast_from(place) * 2;
    }
    trade_four(read_four_words(at, place, row.end), lane)
}

/// Returns the unit's two numbers of a group of eight. In a loop over columns, rows are keys, and the group has eight queries.
#[cube]
fn bias_word(word: u32, #[comptime] t: Base) -> u32 {
    let mut own = word;
    if comptime!(t.columns()) {
        own = transpose(word);
    }
    own
}
