//! The digits of a number that is looked for, four bits each: what numbers weigh by their next digit, and which one reaches what is wanted.

use cubecl::prelude::*;

use crate::kernels::rows::blocks::is_wanted;
use blocksparse_cubecl::shared::row_tile::RowTile;

/// Bits that are found at a time, and what they can be.
pub(crate) const BITS: u32 = 4;
pub(crate) const DIGITS: usize = 1 << BITS;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Search {
    pub tile: RowTile,
    pub by_share: bool,
    /// Whether lists are wanted that have at least a limit, where not all are.
    pub above: bool,
    /// Numbers of a unit at a time.
    pub at_a_time: usize,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SearchLines {
    pub lines: usize,
    pub len: usize,
    pub step: usize,
    /// Of the two kinds.
    pub forced: usize,
    pub forced_second: usize,
    pub wanted: f32,
    pub wanted_second: f32,
    pub share: f32,
    /// Lines of a list, and the limit of its number.
    each: usize,
    limit: f32,
}

/// `totals`: what numbers weigh whose bits are those of `low` under `known`, by their next four bits.
#[cube]
pub(crate) fn add_up(
    numbers: &[f32],
    start: usize,
    from: usize,
    to: usize,
    low: u32,
    known: u32,
    shift: u32,
    bins: &mut [f32],
    sums: &mut [f32],
    totals: &mut [f32],
    #[comptime] c: Search,
) {
    let units = comptime!(c.tile.lanes);
    let unit = UNIT_POS as usize;
    #[unroll]
    for digit in 0..comptime!(DIGITS) {
        bins[comptime!(digit * units).runtime() + unit] = 0.0f32;
    }
    let at_a_time = comptime!(c.at_a_time);
    let mut loaded = Array::<f32>::new(at_a_time);
    let mut place = from + unit;
    while place < to {
        #[unroll]
        for i in 0..at_a_time {
            let own = place + comptime!(i * units);
            loaded[i] = numbers[start + own.min(to - 1)];
        }
        #[unroll]
        for i in 0..at_a_time {
            let own = place + comptime!(i * units);
            let number = loaded[i];
            let bits = u32::reinterpret(number);
            // NaN is above nothing.
            if own < to && number > 0.0f32 && ((bits ^ low) & known) == 0u32 {
                let digit = ((bits >> shift) & comptime!(DIGITS as u32 - 1)) as usize;
                let weight = match comptime!(c.by_share) {
                    true => number,
                    false => 1.0f32.runtime(),
                };
                bins[digit * units + unit] += weight;
            }
        }
        place += comptime!(at_a_time * units);
    }
    sync_cube();
    // As many units a digit as there are digits fewer than units; then sixteen, then one.
    let share = comptime!(units / DIGITS);
    let (digit, part) = (unit / share, unit % share);
    let mut sum = 0.0f32.runtime();
    for i in 0..comptime!(DIGITS) {
        sum += bins[digit * units + part + i * share];
    }
    sums[unit] = sum;
    sync_cube();
    if unit < comptime!(DIGITS * 16) {
        let each = comptime!(share / 16);
        let first = unit / 16 * share + unit % 16 * each;
        let mut sum = 0.0f32.runtime();
        for i in 0..each {
            sum += sums[first + i];
        }
        bins[unit] = sum;
    }
    sync_cube();
    if unit < comptime!(DIGITS) {
        let mut sum = 0.0f32.runtime();
        for i in 0..16usize {
            sum += bins[unit * 16 + i];
        }
        totals[unit] = sum;
    }
    sync_cube();
}

/// Elements of a line that are looked at: none of a line that is not wanted.
#[cube]
pub(crate) fn wanted_len(
    only: &ComptimeOption<Box<[f32]>>,
    line: usize,
    of: &SearchLines,
    #[comptime] c: Search,
) -> usize {
    // What is no number counts as below the limit.
    let wanted = is_wanted(only, line / of.each, of.limit, comptime!(c.above));
    select(wanted, of.len, 0usize)
}

/// A digit, and what numbers weigh that have a higher one.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Found {
    pub digit: u32,
    pub above: f32,
}

/// The highest digit at which what is wanted is reached, by the `totals` of digits and what numbers above all of them weigh; else the lowest.
#[cube]
pub(crate) fn first_reached(totals: &[f32], above: f32, limit: f32) -> Found {
    let mut is_found = false.runtime();
    let mut digit = 0u32.runtime();
    let mut reached = above;
    #[unroll]
    for i in 0..comptime!(DIGITS) {
        let one = comptime!(DIGITS - 1 - i);
        let with = reached + totals[one];
        if !is_found {
            if with >= limit {
                is_found = true;
                digit = comptime!(one as u32).runtime();
            } else if comptime!(one > 0) {
                reached = with;
            }
        }
    }
    Found {
        digit,
        above: reached,
    }
}
