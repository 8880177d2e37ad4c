//! Of each line of numbers the least that is kept: the highest ones, so many, or as many as it takes to have a share of the whole.
//!
//! Nothing is sorted. Numbers above 0 are in the order of their bits, so the least is found four bits at a time: what numbers with the bits that are known
//! weigh is added up by their next four bits. A cube has a line; each unit adds up its own numbers in places of its own, and units' sums are added in a fixed
//! order.

use cubecl::ir::features::Plane;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::args::{address_of, buffer, optional, spread};
use crate::kernels::error::KernelError;
use crate::kernels::rows::tile::{Combine, RowTile, across_lanes};

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
    pub(super) fn forced(&self, len: usize) -> [usize; 2] {
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
    /// Numbers of a line, and from one line to the next.
    pub len: usize,
    /// From one line to the next.
    pub step: usize,
    /// What is kept.
    pub kept: Kept,
}

/// Of lists of lines those that are wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnlyLists<'a> {
    /// `[lists]`.
    pub numbers: &'a Handle,
    pub lists: usize,
    pub limit: f32,
    /// Whether lists are wanted whose number is at least the limit, or all others.
    pub above: bool,
}

/// Bits that are found at a time, and what they can be.
const BITS: u32 = 4;
const DIGITS: usize = 1 << BITS;

/// Units of a cube: many for long lines, if a cube may have as many and as much shared memory.
const FEW: usize = 256;
const MANY: usize = 1024;

/// Numbers of a unit from which on there are many.
const LONG: usize = 16;

/// Numbers that a unit loads before it adds up the first of them, of lines of few and of many numbers: a line has one cube, whose loads have to overlap.
const AT_A_TIME: [usize; 2] = [4, 16];

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Search {
    tile: RowTile,
    by_share: bool,
    /// Whether lists are wanted that have at least a limit, where not all are.
    above: bool,
    /// Numbers of a unit at a time.
    at_a_time: usize,
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct SearchLines {
    lines: usize,
    len: usize,
    step: usize,
    /// Of the two kinds.
    forced: usize,
    forced_second: usize,
    wanted: f32,
    wanted_second: f32,
    share: f32,
    /// Lines of a list, and the limit of its number.
    each: usize,
    limit: f32,
}

/// The least number that is kept of each line, behind what is forced: `least` `[lines]`. What is not above 0 is never kept. Where even all numbers are less
/// than what is wanted it is 0, where none is wanted NaN.
///
/// # Errors
/// [`KernelError`] if the device cannot run it.
pub fn least_kept(
    client: &Client,
    numbers: &Handle,
    of: &KeptLines,
    least: &Handle,
) -> Result<(), KernelError> {
    least_of_lists(client, numbers, of, None, least)
}

/// [`least_kept`], where only some lists are wanted: of lines of others it is anything, and they are not read.
///
/// # Errors
/// [`KernelError`] if the device cannot run it.
pub(super) fn least_of_lists(
    client: &Client,
    numbers: &Handle,
    of: &KeptLines,
    only: Option<OnlyLists>,
    least: &Handle,
) -> Result<(), KernelError> {
    super::check(client)?;
    let KeptLines {
        lines,
        len,
        step,
        kept,
    } = *of;
    let reach = (lines - 1) * step + len;
    super::counted("the numbers of lines", reach)?;
    let properties = client.properties();
    let hardware = &properties.hardware;
    let most = (hardware.max_units_per_cube as usize).min(hardware.max_cube_dim.0 as usize);
    let bytes = |units: usize| ((DIGITS + 2) * units + DIGITS) * size_of::<f32>();
    let is_long = len >= LONG * FEW && most >= MANY;
    let units = match is_long && bytes(MANY) <= hardware.max_shared_memory_size {
        true => MANY,
        false => FEW,
    };
    let plane = match properties.features.plane.contains(Plane::Ops) {
        true => hardware.plane_size_min.max(1) as usize,
        false => 1,
    };
    let tile = RowTile {
        lanes: units,
        rows: 1,
        vector: 1,
        row_vectors: 0,
        plane,
    };
    let forced = kept.forced(len);
    let (wanted, share) = match kept {
        Kept::Count { all, .. } => {
            let wanted = |which: usize| all[which].saturating_sub(forced[which]).min(len) as f32;
            ([wanted(0), wanted(1)], 0.0)
        }
        Kept::Share(share) => ([0.0; 2], share as f32),
    };
    let sizes = SearchLinesLaunch::new(
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
    );
    // SAFETY: a cube reads numbers of its line, below `len`, and writes the least of it.
    unsafe {
        least_of_lines::launch_unchecked(
            client,
            spread(client, lines as u64)?,
            CubeDim::new_1d(units as u32),
            address_of(client, reach)?,
            buffer(numbers, reach),
            buffer(least, lines),
            optional(
                only.map(|only| only.numbers),
                only.map_or(0, |only| only.lists),
            ),
            sizes,
            Search {
                tile,
                by_share: matches!(kept, Kept::Share(_)),
                above: only.is_some_and(|only| only.above),
                at_a_time: AT_A_TIME[usize::from(len >= LONG * units)],
            },
        );
    }
    Ok(())
}

/// `totals`: what numbers weigh whose bits are those of `low` under `known`, by their next four bits.
#[cube]
fn add_up(
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
    let mut len = of.len;
    #[comptime]
    match &only {
        ComptimeOption::Some(only) => {
            let is_above = only[at / of.each] >= of.limit;
            let number = only[at / of.each];
            // Neither is so of what is no number, which counts as below.
            let is_above = number >= of.limit;
            len = match comptime!(c.above) {
                true => select(is_above, len, 0usize),
                false => select(is_above, 0usize, len),
            };
        }
        ComptimeOption::None => {}
    }
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
        above = reached;
        low |= digit << shift;
        known |= comptime!(DIGITS as u32 - 1).runtime() << shift;
    }
    if UNIT_POS == 0 {
        least[at] = f32::reinterpret(low);
    }
}
