//! Of each line of numbers the least that is kept: the highest ones, so many, or as many as it takes to have a share of the whole.
//!
//! Nothing is sorted. Numbers above 0 are in the order of their bits, so the least is found four bits at a time: what numbers with the bits that are known
//! weigh is added up by their next four bits. A cube has a line; each unit adds up its own numbers in places of its own, and units' sums are added in a fixed
//! order.
//!
//! A few lines that are very long have several cubes each, and a launch finds four bits. A cube adds up the elements of a part of a line by their next digit. The
//! next launch adds up the parts' totals, in every cube of the line and in the same order, so that each knows the digit; the first of them writes what is known by
//! then for the launch after it.

use crate::kernels::rows::blocks::{OnlyLists, is_wanted, numbers_of};
use crate::kernels::selection::lanes_of_rows;
use blocksparse_cubecl::limits::most_units;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, RowTile, across_lanes};

/// What of a line is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kept {
    /// So many, so many of the first ones among them whatever they are.
    Count {
        /// All that are kept, of the first and of the second kind of lines.
        all: [usize; 2],
        /// So many of the first ones.
        forced: [usize; 2],
    },
    /// A share of the whole.
    Share(f64),
}

impl Kept {
    /// So many of the first numbers of each kind of lines, of so many.
    pub(crate) fn forced(&self, len: usize) -> [usize; 2] {
        match self {
            Self::Count { forced, .. } => forced.map(|forced| forced.min(len)),
            Self::Share(_) => [0; 2],
        }
    }
}

/// Lines of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeptLines {
    /// How many there are, of two kinds in turn.
    pub lines: usize,
    /// Elements of a line, and from one line to the next.
    pub len: usize,
    /// From one line to the next.
    pub step: usize,
    /// What is kept.
    pub kept: Kept,
}

/// Units of a cube: many for long lines, if a cube may have as many and as much shared memory.
const FEW: usize = 256;
const MANY: usize = 1024;

/// Numbers of a unit from which on there are many.
const LONG: usize = 16;

/// Numbers that a unit loads before it adds up the first of them, of lines of few and of many numbers: a line has one cube, whose loads have to overlap.
const AT_A_TIME: [usize; 2] = [4, 16];

/// The least number that is kept of each line, behind what is forced: `least` `[lines]`. What is not above 0 is never kept. Where even all numbers are less
/// than what is wanted it is 0, where none is wanted NaN. If `only` some lists are wanted, it is anything of lines of others, and they are not read.
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
    // SAFETY: a cube reads elements of its line, below `len`, and writes the least of it.
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
    // Cubes beyond the last line have it again.
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
    // What numbers weigh that are above all that have the bits of `low`.
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

/// Elements of a line from which on it is parted, and of a part.
const PARTED: usize = 1 << 17;
const PART: usize = 1 << 15;

/// The most parts.
const MOST: usize = 32;

/// Launches that find a digit, and one that writes the number.
const DIGIT_PASSES: usize = 32 / BITS as usize;

/// Words that are known of a line: the bits that are found, what numbers above weigh, and what is wanted.
const KNOWN: usize = 3;

/// Whether so many lines of a length have several cubes each: where one each would leave half of the multiprocessors without any.
pub(crate) fn is_parted(client: &Client, [lines, len]: [usize; 2]) -> bool {
    let hardware = &client.properties().hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(64) as usize;
    len >= PARTED && 2 * lines <= multiprocessors
}

/// [`least_kept`](crate::kernels::selection::least_kept) of lines `[lines, len]` by a share.
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
        // SAFETY: a cube reads elements of its line, below `len`, and what the launch before wrote; it writes the totals of its own part, and the first of a line
        // what is known, and the least.
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

/// `totals` `[digits, lines, parts, 16]`, `known` `[digits + 1, lines, 3]`, `least` `[lines]`.
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
    // Cubes beyond the last part make it again.
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
            // The first digits are those of all numbers.
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
        // All ones above the digit.
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
