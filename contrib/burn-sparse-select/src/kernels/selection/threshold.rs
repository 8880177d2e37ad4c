//! Of each line of numbers the least that is kept: the highest ones, so many, or as many as it takes to have a share of the whole.
//!
//! Nothing is sorted. Numbers above 0 are in the order of their bits, so the least is found four bits at a time: what numbers with the bits that are known
//! weigh is added up by their next four bits. A cube has a line; each unit adds up its own numbers in places of its own, and units' sums are added in a fixed
//! order. A few lines that are very long have several cubes each, and a launch for each digit ([`threshold_parts`](crate::kernels::selection::threshold_parts)).

use crate::kernels::rows::blocks::{OnlyLists, numbers_of};
use crate::kernels::selection::digits::{
    BITS, DIGITS, Search, SearchLines, SearchLinesLaunch, add_up, first_reached, wanted_len,
};
use crate::kernels::selection::lanes_of_rows;
use crate::kernels::selection::threshold_parts::{digits_of_parts, is_parted};
use blocksparse_cubecl::limits::most_units;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::row_tile::{Combine, across_lanes};

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
