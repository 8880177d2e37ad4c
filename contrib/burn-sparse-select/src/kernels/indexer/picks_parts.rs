//! Picks of few long rows, whose parts are cubes' own.
//!
//! One cube to a row reads 131,072 numbers three times in 106 µs, while all other multiprocessors are idle. So a launch for each digit counts those of each
//! part, and one more lists each part's numbers:
//!
//! ```text
//! level 0, 1, 2   the digit of the level before, of what all parts counted; then the counts of this level's digits in the cube's own part
//! list            the last digit; how many are kept in the parts before; the numbers of the cube's own part
//! ```
//!
//! Every cube of a row finds the same digits from the same counts, and the first writes them for the launches after the next.

// A kernel's numbers have no such methods.
#![allow(
    clippy::manual_is_multiple_of,
    clippy::manual_memcpy,
    clippy::needless_range_loop
)]

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::indexer::digits::{
    AHEAD, BINS, DIGITS, FOUND, Picked, Run, find_digit, list_numbers, mask_of, number_key,
    shift_of,
};
use crate::kernels::indexer::pairs::{PairSizes, Sizes};
use blocksparse_cubecl::args::{address_of, buffer, optional, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::shared::bins::Bins;
use blocksparse_cubecl::shared::unit_sums::before_and_all;
use blocksparse_cubecl::tuning::{KeyPicking, Tuning};

/// Numbers of a part, at least.
const PART: usize = 8192;
/// Parts of the shortest row that is cut: of 32,768 numbers four launches take 19 µs for 27 where they are replayed; below that they save nothing.
const FEWEST_PARTS: usize = 4;
/// Parts of a row, at most: a cube adds up what all of them counted.
const MOST_PARTS: usize = 32;
/// So many times as many rows as are cut, at most, are multiprocessors.
const FEW: usize = 2;
/// Multiprocessors of a device that does not say.
const MULTIPROCESSORS: usize = 16;

/// How rows are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Numbers of a part, a multiple of what units of a cube look at together.
    len: usize,
    /// Parts of a row.
    count: usize,
}

impl Parts {
    /// How so many rows of so many numbers are cut, if they are few and long.
    pub fn new(client: &Client, rows: usize, columns: usize) -> Option<Self> {
        let known = client.properties().hardware.num_streaming_multiprocessors;
        Self::of(
            known.map_or(MULTIPROCESSORS, |known| known as usize),
            rows,
            columns,
        )
    }

    fn of(multiprocessors: usize, rows: usize, columns: usize) -> Option<Self> {
        // For comparing.
        let is_left_out = Tuning::or_default().key_picks == KeyPicking::Whole;
        if is_left_out || FEW * rows > multiprocessors || columns <= (FEWEST_PARTS - 1) * PART {
            return None;
        }
        let len = columns.div_ceil(MOST_PARTS).next_multiple_of(PART);
        Some(Self {
            len,
            count: columns.div_ceil(len),
        })
    }
}

/// What is known of a row's numbers.
#[derive(CubeType, Clone, Copy)]
struct Known {
    /// Digits of the last that is kept, and which bits they are.
    digits: u32,
    bits: u32,
    /// How many of those that have these digits are kept, and whether all are.
    left: u32,
    is_done: bool,
}

/// A digit, how many numbers are above it, and how many have it.
#[derive(CubeType, Clone, Copy)]
struct Digit {
    value: u32,
    above: u32,
    count: u32,
}

/// What a row is, besides its numbers.
#[derive(CubeType, Clone, Copy)]
struct Row {
    /// Among those that are computed.
    at: usize,
    part: usize,
    keys: usize,
    first_near: usize,
    /// The numbers of the cube's own part.
    begin: usize,
    end: usize,
    /// Where the row's list begins.
    into: usize,
}

#[cube]
fn row_of(
    seen: &ComptimeOption<Box<[i32]>>,
    s: &Sizes,
    most: usize,
    near: usize,
    seen_step: usize,
    parts: usize,
    len: usize,
) -> Row {
    // Cubes beyond the last part make it again.
    let cube = CUBE_POS.min(s.batch * s.rows * parts - 1);
    let at = cube / parts;
    let part = cube % parts;
    let entry = at / s.rows;
    let row = at % s.rows;
    let mut keys = s.position(row) + 1;
    #[comptime]
    match seen {
        ComptimeOption::Some(seen) => {
            keys = max(seen[entry * seen_step + s.start + row], 0i32) as usize;
        }
        ComptimeOption::None => {}
    }
    let keys = keys.min(s.columns);
    Row {
        at,
        part,
        keys,
        first_near: keys - near.min(keys),
        begin: part * len,
        end: (part * len + len).min(keys),
        into: (entry * s.seq_q + s.start + row) * most,
    }
}

/// What the levels before `level` found, of which the last is found here. Every unit of the cube gets here.
#[cube]
fn known_before(
    counts: &mut [u32],
    kept: &mut [u32],
    row: &Row,
    rows: usize,
    parts: usize,
    most: usize,
    partial: &mut [u32],
    found: &mut [u32],
    #[comptime] level: u32,
    #[comptime] t: Picked,
) -> Known {
    let mut known = Known {
        digits: 0u32.runtime(),
        bits: 0u32.runtime(),
        left: row.keys.min(most) as u32,
        is_done: row.keys <= most,
    };
    #[unroll]
    for before in 0..level {
        let (shift, mask) = comptime!((shift_of(before), mask_of(before)));
        let place =
            (row.at * comptime!(DIGITS as usize) + comptime!(before as usize)) * comptime!(FOUND);
        let digit = if comptime!(before + 1 < level) {
            Digit {
                value: kept[place],
                above: kept[place + 1],
                count: kept[place + 2],
            }
        } else {
            let top = comptime!(BINS - 1) - UNIT_POS as usize * comptime!(t.own_bins());
            let mut own = Array::<u32>::new(comptime!(t.own_bins()));
            #[unroll]
            for i in 0..comptime!(t.own_bins()) {
                own[i] = 0u32.runtime();
            }
            let first = (comptime!(before as usize) * rows + row.at) * parts * comptime!(BINS);
            for part in 0..parts {
                #[unroll]
                for i in 0..comptime!(t.own_bins()) {
                    own[i] += counts[first + part * comptime!(BINS) + top - i];
                }
            }
            let step = comptime!(before as usize).runtime();
            find_digit(&own, known.left, known.is_done, found, partial, step, t);
            if row.part == 0 && UNIT_POS == 0 {
                #[unroll]
                for i in 0..comptime!(FOUND) {
                    kept[place + i] = found[i];
                }
            }
            Digit {
                value: found[0],
                above: found[1],
                count: found[2],
            }
        };
        if !known.is_done {
            known.digits |= digit.value << shift;
            known.bits |= comptime!(mask << shift);
            known.left -= digit.above;
            known.is_done = digit.count == known.left;
        }
    }
    known
}

/// Counts the digits of a level in the numbers of each part, `[level][row][part][digit]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn count_digits<N: Size>(
    scores: &[Vector<f32, N>],
    seen: ComptimeOption<Box<[i32]>>,
    counts: &mut [u32],
    kept: &mut [u32],
    s: Sizes,
    most: usize,
    near: usize,
    seen_step: usize,
    parts: usize,
    len: usize,
    #[comptime] level: u32,
    #[comptime] t: Picked,
) {
    let bins = Bins::new(BINS, t.ptx);
    let mut partial = Shared::<[u32]>::new_slice(comptime!(t.sums.partial()));
    let mut found = Shared::<[u32]>::new_slice(comptime!(FOUND));
    let units = comptime!(t.units);
    let width = N::value();
    let unit = UNIT_POS as usize;
    let rows = s.batch * s.rows;
    let row = row_of(&seen, &s, most, near, seen_step, parts, len);
    let known = known_before(
        counts,
        kept,
        &row,
        rows,
        parts,
        most,
        &mut partial,
        &mut found,
        level,
        t,
    );
    #[unroll]
    for i in 0..comptime!(BINS / t.units) {
        bins.clear(unit + comptime!(i * t.units), t.ptx);
    }
    sync_cube();
    let (shift, mask) = comptime!((shift_of(level), mask_of(level)));
    let start = row.at * s.columns / width;
    let last_vector = max(row.keys.div_ceil(width), 1usize) - 1;
    let first = row.begin / width;
    let end = select(known.is_done, first, row.end.div_ceil(width));
    let mut at = first + unit;
    while at < end {
        let mut loaded = Array::<Vector<f32, N>>::new(comptime!(AHEAD));
        #[unroll]
        for i in 0..comptime!(AHEAD) {
            loaded[i] = scores[start + (at + comptime!(i * units)).min(last_vector)];
        }
        #[unroll]
        for i in 0..comptime!(AHEAD) {
            #[unroll]
            for j in 0..width {
                let own = (at + comptime!(i * units)) * width + j;
                let number = number_key(loaded[i].extract(j), own, row.first_near);
                if own < row.end && (number & known.bits) == known.digits {
                    let digit = (number >> shift) & mask;
                    bins.count(digit as usize, t.ptx);
                }
            }
        }
        at += comptime!(AHEAD * units);
    }
    sync_cube();
    let place = ((comptime!(level as usize) * rows + row.at) * parts + row.part) * comptime!(BINS);
    #[unroll]
    for i in 0..comptime!(BINS / t.units) {
        let bin = unit + comptime!(i * t.units);
        counts[place + bin] = bins.get(bin, t.ptx);
    }
}

/// Lists the numbers of each part behind those of the parts before.
#[cube(launch_unchecked, address_type = "dynamic")]
fn list_parts<N: Size>(
    scores: &[Vector<f32, N>],
    seen: ComptimeOption<Box<[i32]>>,
    counts: &mut [u32],
    kept: &mut [u32],
    lists: &mut [i32],
    s: Sizes,
    most: usize,
    near: usize,
    seen_step: usize,
    parts: usize,
    len: usize,
    #[comptime] t: Picked,
) {
    let mut partial = Shared::<[u32]>::new_slice(comptime!(t.sums.partial()));
    let mut found = Shared::<[u32]>::new_slice(comptime!(FOUND));
    let width = N::value();
    let unit = UNIT_POS as usize;
    let rows = s.batch * s.rows;
    let row = row_of(&seen, &s, most, near, seen_step, parts, len);
    let known = known_before(
        counts,
        kept,
        &row,
        rows,
        parts,
        most,
        &mut partial,
        &mut found,
        DIGITS,
        t,
    );
    // What the parts before have: of each level that was needed the numbers of higher digits, and of the last those of the digit itself.
    let mut above = 0u32.runtime();
    let mut equal = 0u32.runtime();
    #[unroll]
    for level in 0..DIGITS {
        let (shift, mask) = comptime!((shift_of(level), mask_of(level)));
        let is_level = known.bits & comptime!(mask << shift) != 0u32;
        let after = comptime!(if level + 1 < DIGITS {
            mask_of(level + 1) << shift_of(level + 1)
        } else {
            0
        });
        let is_last = known.bits & after == 0u32;
        let digit = ((known.digits >> shift) & mask) as usize;
        let first = (comptime!(level as usize) * rows + row.at) * parts * comptime!(BINS);
        let end = select(is_level, row.part, 0usize);
        for part in 0..end {
            #[unroll]
            for i in 0..comptime!(BINS / t.units) {
                let bin = unit + comptime!(i * t.units);
                let count = counts[first + part * comptime!(BINS) + bin];
                above += select(bin > digit, count, 0u32);
                equal += select(bin == digit && is_last, count, 0u32);
            }
        }
    }
    let (_, above) = before_and_all(above, &mut partial, 0usize, t.sums);
    let (_, mut equal) = before_and_all(equal, &mut partial, 1usize, t.sums);
    // Where all are kept nothing was counted.
    if known.bits == 0u32 {
        equal = row.begin.min(row.keys) as u32;
    }
    let run = Run {
        start: row.at * s.columns / width,
        begin: row.begin,
        end: row.end,
        listed: len,
        last_vector: max(row.keys.div_ceil(width), 1usize) - 1,
        first_near: row.first_near,
        digits: known.digits,
        known: known.bits,
        left: known.left,
        above,
        equal,
        into: row.into,
    };
    list_numbers::<N>(scores, lists, &mut partial, &run, t);
    if row.part == 0 {
        let mut at = row.keys.min(most) + unit;
        while at < most {
            lists[row.into + at] = -1i32;
            at += comptime!(t.units);
        }
    }
}

/// [`pick_keys`](crate::kernels::indexer::pick_keys) of rows that are cut.
pub(crate) fn launch(
    client: &Client,
    sizes: &PairSizes,
    // Keys of a list, near ones, and batch entries of how many keys are seen.
    (most, near, of_entries): (usize, usize, Option<usize>),
    [scores, lists]: [&Handle; 2],
    seen: Option<&Handle>,
    vector: usize,
    Parts { len, count: parts }: Parts,
) -> Result<(), KernelError> {
    let t = Picked::new(client, len)?;
    let rows = sizes.batch * sizes.rows[1];
    let of_seen = of_entries.unwrap_or(0) * sizes.seq[0];
    let out = sizes.batch * sizes.seq[0] * most;
    let numbers = DIGITS as usize * rows * parts * BINS;
    let found = rows * DIGITS as usize * FOUND;
    let [counts, kept] = [numbers, found].map(|words| client.empty(words * size_of::<u32>()));
    let largest = sizes.numbers().max(out).max(of_seen).max(numbers);
    let address = address_of(client, largest)?;
    let seen_step = match of_entries {
        Some(entries) if entries > 1 => sizes.seq[0],
        _ => 0,
    };
    let dim = CubeDim::new_1d(t.units as u32);
    for level in 0..DIGITS {
        // SAFETY: a cube reads numbers of its row, how many it sees and what launches before have counted and found, and writes its own part's counts, and
        // what it found as all cubes of its row do; the buffers have the lengths they say (see `buffer`).
        unsafe {
            count_digits::launch_unchecked(
                client,
                spread(client, (rows * parts) as u64)?,
                dim,
                address,
                vector,
                buffer(scores, sizes.numbers() / vector),
                optional(seen, of_seen),
                buffer(&counts, numbers),
                buffer(&kept, found),
                sizes.launch(),
                most,
                near,
                seen_step,
                parts,
                len,
                level,
                t,
            );
        }
    }
    // SAFETY: as above, and it writes places of its row's list: of all parts together no more than `most`.
    unsafe {
        list_parts::launch_unchecked(
            client,
            spread(client, (rows * parts) as u64)?,
            dim,
            address,
            vector,
            buffer(scores, sizes.numbers() / vector),
            optional(seen, of_seen),
            buffer(&counts, numbers),
            buffer(&kept, found),
            buffer(lists, out),
            sizes.launch(),
            most,
            near,
            seen_step,
            parts,
            len,
            t,
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few long rows are cut into parts that have all of their numbers, none of them none, and no row of many is.
    #[test]
    fn few_long_rows_are_cut() {
        for columns in (1..400_000).step_by(977).chain([1 << 20, 1 << 24]) {
            match Parts::of(132, 8, columns) {
                None => assert!(columns <= (FEWEST_PARTS - 1) * PART, "{columns}"),
                Some(Parts { len, count }) => {
                    assert!(
                        len.is_multiple_of(PART) && (FEWEST_PARTS..=MOST_PARTS).contains(&count)
                    );
                    assert!(count * len >= columns && (count - 1) * len < columns);
                }
            }
        }
        assert_eq!(Parts::of(132, 67, 1 << 20), None);
    }
}
