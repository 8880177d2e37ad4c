//! Top-k of a few long rows, which are split over cubes.
//!
//! A single cube per row reads 131,072 numbers three times in 106 µs, while all other multiprocessors idle. So one launch per digit counts the digits of each
//! part, and a last launch lists each part's selection:
//!
//! ```text
//! level 0, 1, 2   find the digit of the level before from the counts of all parts; count this level's digits in the cube's own part
//! list            find the last digit; count the selected numbers of earlier parts; list those of the cube's own part
//! ```
//!
//! Every cube of a row finds the same digits from the same counts, and the first cube stores them for later launches.

// Kernel arrays have no such methods.
#![allow(clippy::manual_memcpy, clippy::needless_range_loop)]

use crate::kernels::indexer::pairs::{PairSizes, Sizes};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::primitives::radix_select::{
    BINS, DIGITS, FOUND, ListPlace, RadixTile, RowKeys, RowKeysExpand, Span, Threshold,
    count_digits, find_digit, list_selected, mask_of, shift_of,
};
use blocksparse_cubecl::shared::bins::Bins;
use blocksparse_cubecl::shared::order_key::{INFINITE, key};
use blocksparse_cubecl::shared::unit_sums::before_and_all;

/// Least number of elements of a part.
const PART: usize = 8192;
/// Number of parts of the shortest row that is split. For 32,768 numbers, four graph-replayed launches take 19 µs instead of 27; below that splitting saves
/// nothing.
const FEWEST_PARTS: usize = 4;
/// Maximum number of parts of a row: a cube sums the counts of all of them.
const MOST_PARTS: usize = 32;
/// Rows are split if the multiprocessors are at least this many times the rows.
const FEW: usize = 2;
/// Number of multiprocessors assumed for devices that do not report it.
const MULTIPROCESSORS: usize = 16;

/// Split of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Number of elements of a part, a multiple of what the units of a cube read at a time.
    len: usize,
    /// Number of parts of a row.
    count: usize,
}

impl Parts {
    /// Returns the split of `rows` rows of `columns` elements, if they are few and long.
    pub fn new(client: &Client, rows: usize, columns: usize) -> Option<Self> {
        let known = client.properties().hardware.num_streaming_multiprocessors;
        Self::of(
            known.map_or(MULTIPROCESSORS, |known| known as usize),
            rows,
            columns,
        )
    }

    fn of(multiprocessors: usize, rows: usize, columns: usize) -> Option<Self> {
        if FEW * rows > multiprocessors || columns <= (FEWEST_PARTS - 1) * PART {
            return None;
        }
        let len = columns.div_ceil(MOST_PARTS).next_multiple_of(PART);
        Some(Self {
            len,
            count: columns.div_ceil(len),
        })
    }
}

/// Returns the threshold of the levels before `level`. The last of these is found here. Every unit of the cube must call this.
#[cube]
fn known_before(
    counts: &mut [u32],
    kept: &mut [u32],
    row: &Row,
    rows: usize,
    of: &RowArgs,
    partial: &mut [u32],
    found: &mut [u32],
    #[comptime] level: u32,
    #[comptime] t: RadixTile,
) -> Threshold {
    let mut threshold = Threshold::new(row.keys.min(of.most) as u32, row.keys);
    #[unroll]
    for before in 0..level {
        let place =
            (row.at * comptime!(DIGITS as usize) + comptime!(before as usize)) * comptime!(FOUND);
        if comptime!(before + 1 < level) {
            threshold.take(kept[place], kept[place + 1], kept[place + 2], before);
        } else {
            let top = comptime!(BINS - 1) - UNIT_POS as usize * comptime!(t.own_bins());
            let mut own = Array::<u32>::new(comptime!(t.own_bins()));
            #[unroll]
            for i in 0..comptime!(t.own_bins()) {
                own[i] = 0u32.runtime();
            }
            let first = (comptime!(before as usize) * rows + row.at) * of.parts * comptime!(BINS);
            for part in 0..of.parts {
                #[unroll]
                for i in 0..comptime!(t.own_bins()) {
                    own[i] += counts[first + part * comptime!(BINS) + top - i];
                }
            }
            let step = comptime!(before as usize).runtime();
            find_digit(&own, &threshold, found, partial, step, t);
            if row.part == 0 && UNIT_POS == 0 {
                #[unroll]
                for i in 0..comptime!(FOUND) {
                    kept[place + i] = found[i];
                }
            }
            threshold.take(found[0], found[1], found[2], before);
        }
    }
    threshold
}

/// Counts the digits of a level in each part, `[level][row][part][digit]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn count_parts<N: Size>(
    scores: &[Vector<u32, N>],
    seen: ComptimeOption<Box<[i32]>>,
    counts: &mut [u32],
    kept: &mut [u32],
    s: Sizes,
    of: RowArgs,
    #[comptime] level: u32,
    #[comptime] t: RadixTile,
) {
    let bins = Bins::new(BINS, t.ptx);
    let mut partial = Shared::<[u32]>::new_slice(comptime!(t.sums.partial()));
    let mut found = Shared::<[u32]>::new_slice(comptime!(FOUND));
    let rows = s.batch * s.rows;
    let row = row_of(&seen, &s, &of, N::value());
    let threshold = known_before(
        counts,
        kept,
        &row,
        rows,
        &of,
        &mut partial,
        &mut found,
        level,
        t,
    );
    count_digits::<N, ScoreKeys>(scores, &row.scores, &row.span, &threshold, &bins, level, t);
    let place = (comptime!(level as usize) * rows + row.at) * of.parts + row.part;
    #[unroll]
    for i in 0..comptime!(t.own_bins()) {
        let bin = UNIT_POS as usize + comptime!(i * t.units);
        counts[place * comptime!(BINS) + bin] = bins.get(bin, t.ptx);
    }
}

/// Lists the selection of each part after those of the parts before.
#[cube(launch_unchecked, address_type = "dynamic")]
fn list_parts<N: Size>(
    scores: &[Vector<u32, N>],
    seen: ComptimeOption<Box<[i32]>>,
    counts: &mut [u32],
    kept: &mut [u32],
    lists: &mut [i32],
    s: Sizes,
    of: RowArgs,
    len: usize,
    #[comptime] t: RadixTile,
) {
    let mut partial = Shared::<[u32]>::new_slice(comptime!(t.sums.partial()));
    let mut found = Shared::<[u32]>::new_slice(comptime!(FOUND));
    let rows = s.batch * s.rows;
    let row = row_of(&seen, &s, &of, N::value());
    let threshold = known_before(
        counts,
        kept,
        &row,
        rows,
        &of,
        &mut partial,
        &mut found,
        DIGITS,
        t,
    );
    // Number of selected elements in the parts before: at each level those with higher digits, and at the last level also those with equal digits.
    let mut above = 0u32.runtime();
    let mut equal = 0u32.runtime();
    #[unroll]
    for level in 0..DIGITS {
        let (shift, mask) = comptime!((shift_of(level), mask_of(level)));
        let is_level = threshold.known & comptime!(mask << shift) != 0u32;
        let after = comptime!(if level + 1 < DIGITS {
            mask_of(level + 1) << shift_of(level + 1)
        } else {
            0
        });
        let is_last = threshold.known & after == 0u32;
        let digit = ((threshold.digits >> shift) & mask) as usize;
        let first = (comptime!(level as usize) * rows + row.at) * of.parts * comptime!(BINS);
        let end = select(is_level, row.part, 0usize);
        for part in 0..end {
            #[unroll]
            for i in 0..comptime!(t.own_bins()) {
                let bin = UNIT_POS as usize + comptime!(i * t.units);
                let count = counts[first + part * comptime!(BINS) + bin];
                above += select(bin > digit, count, 0u32);
                equal += select(bin == digit && is_last, count, 0u32);
            }
        }
    }
    let (_, above) = before_and_all(above, &mut partial, 0usize, t.sums);
    let (_, mut equal) = before_and_all(equal, &mut partial, 1usize, t.sums);
    // If all elements are selected, nothing was counted.
    if threshold.known == 0u32 {
        equal = row.span.begin.min(row.keys) as u32;
    }
    let mut place = ListPlace::new(row.into, len);
    place.above = above;
    place.equal = equal;
    let mut places = ComptimeOption::new_None();
    list_selected::<N, ScoreKeys>(
        scores,
        &row.scores,
        &row.span,
        &threshold,
        lists,
        &mut places,
        &place,
        &mut partial,
        1usize,
        t,
    );
    if row.part == 0 {
        fill_list(lists, &row, &of, t);
    }
}

/// Runs [`top_k_keys`](crate::kernels::indexer::top_k_keys) on split rows.
pub(crate) fn launch(
    of: &Launch,
    rows: usize,
    Parts { len, count: parts }: Parts,
) -> Result<(), KernelError> {
    let client = of.client;
    let t = RadixTile::new(client, len)?;
    let numbers = DIGITS as usize * rows * parts * BINS;
    let found = rows * DIGITS as usize * FOUND;
    let [counts, kept] = [numbers, found].map(|words| client.empty(words * size_of::<u32>()));
    let address = of.address(numbers)?;
    let dim = CubeDim::new_1d(t.units as u32);
    for level in 0..DIGITS {
        // SAFETY: a cube reads elements of its row, its number of visible keys, and results of previous launches. It writes the counts of its own part, and its
        // row's digits, which are the same from all cubes of the row. The buffers have the lengths that `buffer` gets.
        unsafe {
            count_parts::launch_unchecked(
                client,
                spread(client, (rows * parts) as u64)?,
                dim,
                address,
                of.vector,
                of.scores(),
                of.seen(),
                buffer(&counts, numbers),
                buffer(&kept, found),
                of.sizes.launch(),
                of.top_k(parts, len),
                level,
                t,
            );
        }
    }
    // SAFETY: as above; a cube also writes its part's entries of its row's list, at most `most` over all parts.
    unsafe {
        list_parts::launch_unchecked(
            client,
            spread(client, (rows * parts) as u64)?,
            dim,
            address,
            of.vector,
            of.scores(),
            of.seen(),
            buffer(&counts, numbers),
            buffer(&kept, found),
            buffer(of.lists, of.out()),
            of.sizes.launch(),
            of.top_k(parts, len),
            len,
            t,
        );
    }
    Ok(())
}

/// Parameters of a selection by scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopKKeys {
    /// Number of keys of a query's list.
    pub most: usize,
    /// Number of last visible keys that count as the highest.
    pub near: usize,
    /// Number of batch entries of `seen`, 1 or all. `None` if queries see the keys up to their own positions.
    pub seen: Option<usize>,
}

/// Parameters of a selection, in a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct RowArgs {
    /// Number of keys of a query's list.
    pub most: usize,
    /// Number of last visible keys that count as the highest.
    near: usize,
    /// Elements of `seen` from one batch entry to the next, 0 if they share them.
    seen_step: usize,
    /// Number of parts of a row, and of elements of a part.
    pub parts: usize,
    len: usize,
}

/// A row of scores, and the cube's part of it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Row {
    /// Index among the computed rows.
    pub at: usize,
    pub part: usize,
    /// Number of keys that the query sees.
    pub keys: usize,
    /// Elements of the cube's part.
    pub span: Span,
    /// Offset of the row's list.
    pub into: usize,
    pub scores: ScoreKeys,
}

/// Scores as sort keys; near keys are the highest.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ScoreKeys {
    /// Index of the row's first vector.
    start: usize,
    /// Index from which on elements count as the highest.
    first_near: usize,
}

#[cube]
impl RowKeys for ScoreKeys {
    fn load<N: Size>(&self, numbers: &[Vector<u32, N>], vector: usize) -> Vector<u32, N> {
        numbers[self.start + vector]
    }

    fn key(&self, number: u32, at: usize) -> u32 {
        select(at >= self.first_near, INFINITE, key(number))
    }
}

#[cube]
pub(crate) fn row_of(
    seen: &ComptimeOption<Box<[i32]>>,
    s: &Sizes,
    of: &RowArgs,
    #[comptime] width: usize,
) -> Row {
    // Surplus cubes repeat the last part.
    let cube = CUBE_POS.min(s.batch * s.rows * of.parts - 1);
    let at = cube / of.parts;
    let part = cube % of.parts;
    let entry = at / s.rows;
    let row = at % s.rows;
    let mut keys = s.position(row) + 1;
    #[comptime]
    match seen {
        ComptimeOption::Some(seen) => {
            keys = max(seen[entry * of.seen_step + s.start + row], 0i32) as usize;
        }
        ComptimeOption::None => {}
    }
    let keys = keys.min(s.columns);
    Row {
        at,
        part,
        keys,
        span: Span {
            begin: part * of.len,
            end: (part * of.len + of.len).min(keys),
        },
        into: (entry * s.seq_q + s.start + row) * of.most,
        scores: ScoreKeys {
            start: at * s.columns / width,
            first_near: keys - of.near.min(keys),
        },
    }
}

/// Writes −1 after the last key of a row's list.
#[cube]
pub(crate) fn fill_list(lists: &mut [i32], row: &Row, of: &RowArgs, #[comptime] t: RadixTile) {
    let mut at = row.keys.min(of.most) + UNIT_POS as usize;
    while at < of.most {
        lists[row.into + at] = -1i32;
        at += comptime!(t.units);
    }
}

/// Arguments of a launch.
pub(crate) struct Launch<'a> {
    pub client: &'a Client,
    pub sizes: &'a PairSizes,
    pub of: &'a TopKKeys,
    pub scores: &'a Handle,
    pub lists: &'a Handle,
    pub seen: Option<&'a Handle>,
    /// Number of elements of a vector load.
    pub vector: usize,
}

impl Launch<'_> {
    /// Returns the number of elements of all lists.
    pub fn out(&self) -> usize {
        self.sizes.batch * self.sizes.seq[0] * self.of.most
    }

    fn of_seen(&self) -> usize {
        self.of.seen.unwrap_or(0) * self.sizes.seq[0]
    }

    /// Returns the index type of a launch with `others` elements in further buffers.
    pub fn address(&self, others: usize) -> Result<AddressType, KernelError> {
        let own = self.sizes.elements().max(self.out()).max(self.of_seen());
        address_of(self.client, own.max(others))
    }

    pub fn scores(&self) -> BufferArg {
        buffer(self.scores, self.sizes.elements() / self.vector)
    }

    pub fn seen<T: LaunchArg<RuntimeArg = BufferArg>>(&self) -> ComptimeOptionArgs<T> {
        optional(self.seen, self.of_seen())
    }

    /// Returns launch arguments for rows that are split into `parts` parts of `len` elements.
    pub fn top_k(&self, parts: usize, len: usize) -> RowArgsLaunch {
        let seen_step = match self.of.seen {
            Some(entries) if entries > 1 => self.sizes.seq[0],
            _ => 0,
        };
        RowArgsLaunch::new(self.of.most, self.of.near, seen_step, parts, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few long rows are split into non-empty parts that cover all elements; many rows are not split.
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
