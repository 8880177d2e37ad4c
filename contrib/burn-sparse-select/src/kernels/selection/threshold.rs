//! Finds the smallest selected number of each line: that of the highest ones by count, or of as many as it takes to cover a share of the total.
//!
//! Nothing is sorted. The bits of positive floats are ordered like the floats, so the threshold is found by radix search, four bits at a time: numbers that
//! match the known bits are counted or summed in bins by their next four bits. Each cube has a line; each unit has its own bins, and these are summed in a
//! fixed order.
//!
//! A few very long lines are split over several cubes, with a launch per digit. A cube fills the bins of its part of the line. In the next launch every cube of
//! the line sums the bins of all parts in the same order, so each knows the digit; the first cube stores the state for the launch after that.

use crate::kernels::rows::blocks::{OnlyLists, is_wanted, numbers_of};
use crate::kernels::selection::lanes_of_rows;
use blocksparse_cubecl::limits::most_units;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// Rule that selects elements of a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kept {
    /// The highest elements by count. The first elements of a line are always selected and included in the count.
    Count {
        /// Number of selected numbers, for the first and the second kind of lines.
        all: [usize; 2],
        /// Number of forced numbers at the start of a line, per kind.
        forced: [usize; 2],
    },
    /// As many of the highest numbers as cover this share of the total.
    Share(f64),
}

impl Kept {
    /// Returns how many numbers at the start of a line of `len` are forced, per kind of lines.
    pub(crate) fn forced(&self, len: usize) -> [usize; 2] {
        match self {
            Self::Count { forced, .. } => forced.map(|forced| forced.min(len)),
            Self::Share(_) => [0; 2],
        }
    }
}

/// Lines of numbers and the rule that selects from them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeptLines {
    /// Number of lines, of two alternating kinds.
    pub lines: usize,
    /// Number of elements of a line.
    pub len: usize,
    /// Number of elements from the start of one line to the next.
    pub step: usize,
    pub kept: Kept,
}

/// Number of units of a cube. Long lines use `MANY`, if the device supports such cubes and their shared memory.
const FEW: usize = 256;
const MANY: usize = 1024;

/// Number of elements per unit from which on a line is long.
const LONG: usize = 16;

/// Number of elements that a unit loads before it adds the first of them, for few and for many units. A line has one cube, so its loads have to overlap.
const AT_A_TIME: [usize; 2] = [4, 16];

/// Finds the smallest selected number of each line after its forced ones: `least` `[lines]`. Only positive numbers are ever selected. The result is 0 if all
/// numbers together do not reach the rule, and NaN if it selects none. With `only`, other lists are not read and their results are unspecified.
pub fn least_kept(
    client: &Client,
    numbers: &Handle,
    of: &KeptLines,
    only: Option<OnlyLists>,
    least: &Handle,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let KeptLines {
        lines,
        len,
        step,
        kept,
    } = *of;
    let reach = (lines - 1) * step + len;
    crate::kernels::selection::counted("the numbers of lines", reach)?;
    let hardware = &client.properties().hardware;
    let most = most_units(client.properties());
    let bytes = |units: usize| ((DIGITS + 2) * units + DIGITS) * size_of::<f32>();
    let is_long = len >= LONG * FEW && most >= MANY;
    let units = match is_long && bytes(MANY) <= hardware.max_shared_memory_size {
        true => MANY,
        false => FEW,
    };
    let forced = kept.forced(len);
    let (wanted, share) = match kept {
        Kept::Count { all, .. } => {
            let wanted = |which: usize| all[which].saturating_sub(forced[which]).min(len) as f32;
            ([wanted(0), wanted(1)], 0.0)
        }
        Kept::Share(share) => ([0.0; 2], share as f32),
    };
    let sizes = || {
        SearchLinesLaunch::new(
            lines,
            len,
            step,
            forced[0],
            forced[1],
            wanted[0],
            wanted[1],
            share,
            only.map_or(1, |only| lines / only.lists),
            only.map_or(0.0, |only| only.limit),
        )
    };
    let search = Search {
        tile: lanes_of_rows(client, units, 1),
        by_share: matches!(kept, Kept::Share(_)),
        above: only.is_some_and(|only| only.above),
        at_a_time: AT_A_TIME[usize::from(len >= LONG * units)],
    };
    if share > 0.0 && is_parted(client, [lines, len]) {
        return digits_of_parts(
            client,
            (numbers, reach),
            [lines, len],
            only,
            sizes,
            Search {
                tile: lanes_of_rows(client, FEW, 1),
                at_a_time: AT_A_TIME[1],
                ..search
            },
            least,
        );
    }
    // SAFETY: a cube reads elements of its line, below `len`, and writes the result of it.
    unsafe {
        least_of_lines::launch_unchecked(
            client,
            spread(client, lines as u64)?,
            CubeDim::new_1d(units as u32),
            address_of(client, reach)?,
            buffer(numbers, reach),
            buffer(least, lines),
            numbers_of(only),
            sizes(),
            search,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn least_of_lines(
    numbers: &[f32],
    least: &mut [f32],
    only: ComptimeOption<Box<[f32]>>,
    of: SearchLines,
    #[comptime] c: Search,
) {
    // Surplus cubes repeat the last line.
    let at = CUBE_POS.min(of.lines - 1);
    let is_second = at % 2 == 1;
    let start = at * of.step;
    let forced = select(is_second, of.forced_second, of.forced);
    let mut limit = select(is_second, of.wanted_second, of.wanted);
    let len = wanted_len(&only, at, &of, c);
    let units = comptime!(c.tile.lanes);
    let mut bins = Shared::<[f32]>::new_slice(comptime!(DIGITS * units));
    let mut sums = Shared::<[f32]>::new_slice(units);
    let mut totals = Shared::<[f32]>::new_slice(comptime!(DIGITS));
    if comptime!(c.by_share) {
        let mut whole = 0.0f32.runtime();
        let mut place = UNIT_POS as usize;
        while place < len {
            let mut loaded = Array::<f32>::new(comptime!(c.at_a_time));
            #[unroll]
            for i in 0..comptime!(c.at_a_time) {
                let own = place + comptime!(i * units);
                loaded[i] = numbers[start + own.min(len - 1)];
            }
            #[unroll]
            for i in 0..comptime!(c.at_a_time) {
                let is_there = place + comptime!(i * units) < len;
                whole += select(is_there && loaded[i] > 0.0f32, loaded[i], 0.0f32);
            }
            place += comptime!(c.at_a_time * units);
        }
        let whole = across_lanes::<f32>(whole, &mut sums, comptime!(c.tile), Combine::Sum);
        limit = of.share * whole;
        sync_cube();
    }
    let mut low = 0u32.runtime();
    let mut known = 0u32.runtime();
    // Weight of the numbers above all that match the bits of `low`.
    let mut above = 0.0f32.runtime();
    for step in 0..comptime!(32 / BITS) {
        let shift = comptime!(32 - BITS).runtime() - step * comptime!(BITS);
        add_up(
            numbers,
            start,
            forced,
            len,
            low,
            known,
            shift,
            &mut bins,
            &mut sums,
            &mut totals,
            c,
        );
        let found = first_reached(&totals, above, limit);
        above = found.above;
        low |= found.digit << shift;
        known |= comptime!(DIGITS as u32 - 1).runtime() << shift;
    }
    if UNIT_POS == 0 {
        least[at] = f32::reinterpret(low);
    }
}

/// Number of bits that are found at a time, and number of values of these.
pub(crate) const BITS: u32 = 4;
pub(crate) const DIGITS: usize = 1 << BITS;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Search {
    pub tile: RowTile,
    pub by_share: bool,
    /// True if only lists at or above a limit are computed, instead of those below it.
    pub above: bool,
    /// Number of elements that a unit loads at a time.
    pub at_a_time: usize,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct SearchLines {
    pub lines: usize,
    pub len: usize,
    pub step: usize,
    /// Values of the two kinds of lines.
    pub forced: usize,
    pub forced_second: usize,
    pub wanted: f32,
    pub wanted_second: f32,
    pub share: f32,
    /// Number of lines of a list, and the limit of its number.
    each: usize,
    limit: f32,
}

/// Computes `totals`: the weight of numbers that match `low` in the bits of `known`, by their next four bits.
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
            // NaN compares false.
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
    // Reduces the bins in three steps: `units / DIGITS` units per digit, then 16, then one.
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

/// Returns the number of elements of a line to look at: 0 if its list is not selected.
#[cube]
pub(crate) fn wanted_len(
    only: &ComptimeOption<Box<[f32]>>,
    line: usize,
    of: &SearchLines,
    #[comptime] c: Search,
) -> usize {
    // NaN counts as below the limit.
    let wanted = is_wanted(only, line / of.each, of.limit, comptime!(c.above));
    select(wanted, of.len, 0usize)
}

/// A digit, and the weight of numbers with a higher one.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Found {
    pub digit: u32,
    pub above: f32,
}

/// Returns the highest digit at which the limit is reached, given the `totals` of digits and the weight `above` them. If none reaches it, returns the lowest
/// digit.
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

/// Number of elements from which on a line is split, and number of elements of a part.
const PARTED: usize = 1 << 17;
const PART: usize = 1 << 15;

/// Maximum number of parts.
const MOST: usize = 32;

/// Number of launches that find a digit. One more writes the result.
const DIGIT_PASSES: usize = 32 / BITS as usize;

/// Number of state words of a line: the known bits, the weight above them, and the limit.
const KNOWN: usize = 3;

/// Returns whether lines are split over several cubes: if they are long, and one cube each would leave half of the multiprocessors idle.
pub(crate) fn is_parted(client: &Client, [lines, len]: [usize; 2]) -> bool {
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(64) as usize;
    len >= PARTED && 2 * lines <= multiprocessors
}

/// Computes [`least_kept`](crate::kernels::selection::least_kept) of long lines `[lines, len]` by share.
pub(crate) fn digits_of_parts(
    client: &Client,
    (numbers, reach): (&Handle, usize),
    [lines, len]: [usize; 2],
    only: Option<OnlyLists>,
    sizes: impl Fn() -> SearchLinesLaunch,
    search: Search,
    least: &Handle,
) -> Result<(), KernelError> {
    let parts = len.div_ceil(PART).min(MOST);
    let count = lines * parts;
    let totals_len = DIGIT_PASSES * count * DIGITS;
    let known_len = (DIGIT_PASSES + 1) * lines * KNOWN;
    let totals = client.empty(totals_len * size_of::<f32>());
    let known = client.empty(known_len * size_of::<u32>());
    for pass in 0..=DIGIT_PASSES {
        // SAFETY: a cube reads elements of its line, below `len`, and results of the previous launch. It writes the totals of its own part, and the first cube
        // of a line writes its state and the result.
        unsafe {
            digit_of_parts::launch_unchecked(
                client,
                spread(client, count as u64)?,
                CubeDim::new_1d(search.tile.lanes as u32),
                address_of(client, reach)?,
                buffer(numbers, reach),
                buffer(&totals, totals_len),
                buffer(&known, known_len),
                buffer(least, lines),
                numbers_of(only),
                sizes(),
                parts,
                pass,
                search,
            );
        }
    }
    Ok(())
}

/// Finds the digit of the previous pass, and fills the bins of this pass for each part. `totals` is `[digits, lines, parts, 16]`, `known`
/// `[digits + 1, lines, 3]`, `least` `[lines]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn digit_of_parts(
    numbers: &[f32],
    totals: &mut [f32],
    known: &mut [u32],
    least: &mut [f32],
    only: ComptimeOption<Box<[f32]>>,
    of: SearchLines,
    parts: usize,
    pass: usize,
    #[comptime] c: Search,
) {
    let units = comptime!(c.tile.lanes);
    // Surplus cubes repeat the last part.
    let at = CUBE_POS.min(of.lines * parts - 1);
    let (line, part) = (at / parts, at % parts);
    let unit = UNIT_POS as usize;
    let mut bins = Shared::<[f32]>::new_slice(comptime!(DIGITS * units));
    let mut sums = Shared::<[f32]>::new_slice(units);
    let mut of_digits = Shared::<[f32]>::new_slice(comptime!(DIGITS));
    let mut low = 0u32.runtime();
    let mut above = 0.0f32.runtime();
    let mut limit = 0.0f32.runtime();
    if pass > 0 {
        let before = (pass - 1) * of.lines + line;
        if unit < comptime!(DIGITS) {
            let mut sum = 0.0f32.runtime();
            for other in 0..parts {
                sum += totals[(before * parts + other) * comptime!(DIGITS) + unit];
            }
            of_digits[unit] = sum;
        }
        sync_cube();
        if pass > 1 {
            let own = before * comptime!(KNOWN);
            low = known[own];
            above = f32::reinterpret(known[own + 1]);
            limit = f32::reinterpret(known[own + 2]);
        } else {
            // The totals of the first digit cover all numbers.
            let mut whole = 0.0f32.runtime();
            #[unroll]
            for digit in 0..comptime!(DIGITS) {
                whole += of_digits[digit];
            }
            limit = of.share * whole;
        }
        let found = first_reached(&of_digits, above, limit);
        above = found.above;
        low |= found.digit << (comptime!(32u32).runtime() - pass as u32 * comptime!(BITS));
        sync_cube();
    }
    if pass < comptime!(DIGIT_PASSES) {
        let len = wanted_len(&only, line, &of, c);
        let each = of.len.div_ceil(parts);
        let from = part * each;
        let shift = comptime!(32 - BITS).runtime() - pass as u32 * comptime!(BITS);
        // Mask of the bits above the digit.
        let mut found = 0u32.runtime();
        if pass > 0 {
            found = comptime!(u32::MAX).runtime() << (shift + comptime!(BITS));
        }
        add_up(
            numbers,
            line * of.step,
            from,
            (from + each).min(len),
            low,
            found,
            shift,
            &mut bins,
            &mut sums,
            &mut of_digits,
            c,
        );
        let own = (pass * of.lines + line) * parts + part;
        if unit < comptime!(DIGITS) {
            totals[own * comptime!(DIGITS) + unit] = of_digits[unit];
        }
    }
    if part == 0 && unit == 0 {
        let own = (pass * of.lines + line) * comptime!(KNOWN);
        known[own] = low;
        known[own + 1] = u32::reinterpret(above);
        known[own + 2] = u32::reinterpret(limit);
        if pass == comptime!(DIGIT_PASSES) {
            least[line] = f32::reinterpret(low);
        }
    }
}
