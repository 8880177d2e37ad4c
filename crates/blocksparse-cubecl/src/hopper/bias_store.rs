//! Stores of the sums of a tile of pairs to the gradient of a bias.

use cubecl::prelude::*;

use super::options::*;
use super::pair_tile::PairTile;
use crate::arch::instructions;
use crate::arch::sm90::*;
use crate::shared::addressing::PlanWords;
use blocksparse::plan::EMPTY;

/// Location of the sums: the first batch entry and head that share them, and the word of the step's first entry.
#[derive(CubeType, Clone, Copy)]
pub struct PairPlace {
    pub batch: u32,
    pub head: u32,
    pub entry: usize,
}

/// Writes the tile's sums, or adds them to the present values. Padding entries of a step duplicate other pairs and are skipped.
#[cube]
pub fn store_pairs<S: Size>(
    gradient: &mut [f32],
    sums: &Vector<f32, S>,
    args: &ComptimeOption<PairArgs>,
    to: &PairPlace,
    rows: &UnitRows,
    plan: &PlanWords,
    #[comptime] t: PairTile,
) {
    let pairs = &args.as_ref().unwrap().pairs;
    // Strides are those of the bias, in bytes of half precision. The gradient is in f32.
    let at =
        u64::cast_from(to.batch) * pairs.bias_batch + u64::cast_from(to.head) * pairs.bias_head;
    let begin = global_address::<f32>(&*gradient) + at * 2u64;
    let row_bytes = u64::cast_from(pairs.bias_row) * 2u64;
    let upper = begin + u64::cast_from(rows.upper) * row_bytes;
    let lower = begin + u64::cast_from(rows.lower) * row_bytes;
    let upper_end = select(rows.upper < pairs.queries, pairs.keys, 0u32);
    let lower_end = select(rows.lower < pairs.queries, pairs.keys, 0u32);
    let mut stride = 1u32;
    if comptime!(t.residue) {
        stride = plan.listing.stride as u32;
    }
    let mut before = Vector::<f32, S>::zeroed();
    if comptime!(t.carry) {
        // Load all of them first, because loads would wait for stores in between.
        #[unroll]
        for eight in 0..comptime!(t.cols / 8) {
            let col = column_of(plan, to.entry, eight, stride, t);
            let at = comptime!(4 * eight);
            let two = load_two(upper, col, stride, upper_end, t.wide);
            before.insert(at, two.extract(0usize));
            before.insert(comptime!(at + 1), two.extract(1usize));
            let two = load_two(lower, col, stride, lower_end, t.wide);
            before.insert(comptime!(at + 2), two.extract(0usize));
            before.insert(comptime!(at + 3), two.extract(1usize));
        }
    }
    #[unroll]
    for eight in 0..comptime!(t.cols / 8) {
        let col = column_of(plan, to.entry, eight, stride, t);
        let at = comptime!(4 * eight);
        let mut x = sums.extract(at);
        let mut y = sums.extract(comptime!(at + 1));
        let mut z = sums.extract(comptime!(at + 2));
        let mut w = sums.extract(comptime!(at + 3));
        if comptime!(t.carry) {
            x += before.extract(at);
            y += before.extract(comptime!(at + 1));
            z += before.extract(comptime!(at + 2));
            w += before.extract(comptime!(at + 3));
        }
        store_two(upper, col, stride, upper_end, x, y, t.wide);
        store_two(lower, col, stride, lower_end, z, w, t.wide);
    }
}

/// Returns the position of the unit's first of two columns in a group of eight. For padding entries it is beyond every sequence.
#[cube]
fn column_of(
    plan: &PlanWords,
    its_entry: usize,
    #[comptime] eight: usize,
    stride: u32,
    #[comptime] t: PairTile,
) -> u32 {
    let col = comptime!(8 * eight);
    let entry = its_entry + comptime!(col / t.group * 2);
    let place = plan.words[entry] * comptime!(t.group as u32) + comptime!((col % t.group) as u32);
    let first = position_at(place, &plan.listing, t.residue);
    select(
        plan.words[entry + 1] == EMPTY,
        u32::new(1 << 30),
        first + unit() % 4 * 2 * stride,
    )
}

/// Loads the two elements of a row at columns `col` and `col + stride`, with 0 from column `end` on.
#[cube]
fn load_two(
    row: u64,
    col: u32,
    stride: u32,
    end: u32,
    #[comptime] wide: bool,
) -> Vector<f32, Const<2>> {
    let at = row + u64::cast_from(col) * 4u64;
    let mut two = Vector::<f32, Const<2>>::zeroed();
    if comptime!(wide) {
        two = load_pair(at, col, end);
    } else {
        two.insert(0usize, load_single(at, col, end));
        let next = at + u64::cast_from(stride) * 4u64;
        two.insert(1usize, load_single(next, col + stride, end));
    }
    two
}

#[cube]
fn store_two(row: u64, col: u32, stride: u32, end: u32, x: f32, y: f32, #[comptime] wide: bool) {
    let at = row + u64::cast_from(col) * 4u64;
    if comptime!(wide) {
        store_pair(at, col, end, x, y);
    } else {
        store_single(at, col, end, x);
        store_single(at + u64::cast_from(stride) * 4u64, col + stride, end, y);
    }
}

instructions! {
    /// Loads two numbers, or 0 unless `index < end`.
    fn load_pair(address: u64, index: u32, end: u32) -> Vector<f32, Const<2>> =
        "{{ .reg .pred p; setp.lt.u32 p, {index}, {end}; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000; \
        @p ld.global.v2.f32 {o}, [{address}]; }}";

    /// Loads a number, or 0 unless `index < end`.
    fn load_single(address: u64, index: u32, end: u32) -> f32 =
        "{{ .reg .pred p; setp.lt.u32 p, {index}, {end}; mov.f32 {o}, 0f00000000; @p ld.global.f32 {o}, [{address}]; }}";

    /// Stores two numbers if `index < end`.
    fn store_pair(address: u64, index: u32, end: u32, x: f32, y: f32) =
        "{{ .reg .pred p; setp.lt.u32 p, {index}, {end}; @p st.global.v2.f32 [{address}], {{{x}, {y}}}; }}";

    /// Stores a number if `index < end`.
    fn store_single(address: u64, index: u32, end: u32, x: f32) =
        "{{ .reg .pred p; setp.lt.u32 p, {index}, {end}; @p st.global.f32 [{address}], {x}; }}";
}
