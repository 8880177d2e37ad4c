//! Key blocks that contain a selected key or a selected distance from a query back to a key, or that are selected as a whole.
//!
//! ```text
//! flags       whether a key block contains a selected key; which block distances contain a selected distance   16 units per flag
//! heaviest    whether a key block, or a block distance, is among the heaviest                                  a unit per flag
//! scores      1 or 0 for each query block and key block                                                        a unit per score
//! ```

use std::ops::Range;

use crate::kernels::rows::blocks::OnlyLists;
use crate::kernels::selection::UNITS;
use crate::kernels::selection::threshold::{Kept, KeptLines, least_kept};
use blocksparse_cubecl::prelude::*;

/// Sizes of a call, and the rule that selects keys and distances.
#[derive(Clone, Debug, PartialEq)]
pub struct Touched {
    /// `batch · heads`.
    pub lists: usize,
    /// Number of queries and keys.
    pub seq: [usize; 2],
    /// Number of queries, and of keys, of a block.
    pub block: usize,
    /// Range of rows of blocks.
    pub rows: Range<usize>,
    /// Rule that selects keys and distances.
    pub kept: Kept,
}

/// Number of units per flag.
const LANES: usize = 16;

/// Relative difference below which two numbers count as equal.
const APART: f32 = 1e-6;

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct FlagSizes {
    keys: usize,
    block: usize,
    /// Number of flags of a line.
    flags: usize,
    /// Distance at which flag 1 starts; the others follow at whole blocks.
    first: usize,
    forced: usize,
    forced_second: usize,
    count: usize,
}

impl Touched {
    pub(crate) fn blocks(&self) -> usize {
        self.seq[1].div_ceil(self.block)
    }

    /// Returns the number of flags of a line, for key blocks or block distances.
    pub(crate) fn flags(&self) -> usize {
        self.blocks() + 2
    }

    /// Returns the offset of the first query from the first key, in whole blocks and the remainder.
    fn offset(&self) -> [i64; 2] {
        let (offset, block) = (self.seq[1] as i64 - self.seq[0] as i64, self.block as i64);
        [offset.div_euclid(block), offset.rem_euclid(block)]
    }

    fn kept_lines(&self) -> KeptLines {
        let keys = self.seq[1];
        KeptLines {
            lines: 2 * self.lists,
            len: keys,
            step: keys,
            kept: self.kept,
        }
    }

    /// Computes the flags from sums of keys and of distances `[lists, 2, keys]`, and block sums `[lists, 2, flags]`: over the keys of a block, and over the
    /// distances from the queries of a block to the first key of a block. With `only`, flags of other lists are unspecified.
    pub(crate) fn flag(
        &self,
        client: &Client,
        sums: &Handle,
        only: Option<OnlyLists>,
    ) -> Result<[Handle; 2], KernelError> {
        let (lists, flags, keys) = (self.lists, self.flags(), self.seq[1]);
        let made = |len: usize| client.empty(len * size_of::<u32>());
        let least = made(2 * lists);
        least_kept(client, sums, &self.kept_lines(), only, &least)?;
        let count = 2 * lists * flags;
        let (flagged, of_blocks) = (made(count), made(count));
        let [forced, forced_second] = self.kept.forced(keys);
        let [_, first] = self.offset();
        let sizes = FlagSizesLaunch::new(
            keys,
            self.block,
            flags,
            first as usize,
            forced,
            forced_second,
            count,
        );
        // SAFETY: units read numbers of lines below `keys`; the first unit of each flag below `count` writes it.
        unsafe {
            flags_of_lines::launch_unchecked(
                client,
                spread(client, (count * LANES).div_ceil(UNITS) as u64)?,
                CubeDim::new_1d(UNITS as u32),
                AddressType::U32,
                buffer(sums, 2 * lists * keys),
                buffer(&least, 2 * lists),
                buffer(&flagged, count),
                buffer(&of_blocks, count),
                sizes,
            );
        }
        Ok([flagged, of_blocks])
    }

    /// Computes the flags of the `blocks` key blocks and block distances with the largest block sums, including the first block and the queries' own.
    pub(crate) fn heaviest(
        &self,
        client: &Client,
        of_blocks: &Handle,
        blocks: usize,
    ) -> Result<Handle, KernelError> {
        let (lists, flags) = (self.lists, self.flags());
        let lines = KeptLines {
            lines: 2 * lists,
            len: flags,
            step: flags,
            kept: Kept::Count {
                // A query's own block spans the distances of two flags.
                all: [blocks, blocks.saturating_add(1)],
                forced: OWN,
            },
        };
        let made = |len: usize| client.empty(len * size_of::<u32>());
        let (least, count) = (made(2 * lists), 2 * lists * flags);
        least_kept(client, of_blocks, &lines, None, &least)?;
        let heaviest = made(count);
        // SAFETY: a unit below `count` reads the sum of its flag and writes the flag.
        unsafe {
            flags_of_blocks::launch_unchecked(
                client,
                spread(client, count.div_ceil(UNITS) as u64)?,
                CubeDim::new_1d(UNITS as u32),
                AddressType::U32,
                buffer(of_blocks, count),
                buffer(&least, 2 * lists),
                buffer(&heaviest, count),
                flags,
                count,
            );
        }
        Ok(heaviest)
    }

    pub(crate) fn scores(&self) -> ScoreSizesLaunch {
        let [blocks_behind, _] = self.offset();
        ScoreSizesLaunch::new(
            self.rows.len(),
            self.rows.start,
            self.blocks(),
            self.flags(),
            blocks_behind as i32 + 1,
            self.lists * self.rows.len() * self.blocks(),
        )
    }
}

/// Writes scores of 1 and 0, f32 `[lists, rows, blocks]`: 1 if a block contains a selected key or a pair at a selected distance, by `sums` `[lists, 2, keys]`
/// of keys and of distances (`line_sums`).
pub fn touched_blocks(
    client: &Client,
    sums: &Handle,
    of: &Touched,
    out: &Handle,
) -> Result<(), KernelError> {
    crate::kernels::selection::check(client)?;
    let count = of.lists * of.rows.len() * of.blocks();
    crate::kernels::selection::counted("the scores of blocks", count)?;
    if count == 0 {
        return Ok(());
    }
    let [flags, _] = of.flag(client, sums, None)?;
    // SAFETY: a unit below `count` reads flags of its list and writes its own score.
    unsafe {
        touched_scores::launch_unchecked(
            client,
            spread(client, count.div_ceil(UNITS) as u64)?,
            CubeDim::new_1d(UNITS as u32),
            AddressType::U32,
            buffer(&flags, 2 * of.lists * of.flags()),
            buffer(out, count),
            of.scores(),
        );
    }
    Ok(())
}

/// Returns whether a number is selected.
#[cube]
pub(crate) fn is_kept(number: f32, least: f32) -> bool {
    number > 0.0f32 && number >= least * comptime!(1.0 - APART)
}

/// Number of forced flags: the first key block, and the distances of a query's own block.
const OWN: [usize; 2] = [1, 2];

/// Computes flags and block sums from keys and distances. `sums` is `[lists, 2, keys]`, `least` `[lists, 2]`; `flags` and the block sums `of_blocks` are
/// `[lists, 2, flags]`.
///
/// Flag `p` of distances belongs to a query block whose first query is `first + (p − 1) · block` after the first key of a key block, and covers all distances
/// between two complete blocks at these positions. Its block sum covers the distances of the query block's queries to the first key of the key block.
#[cube(launch_unchecked, address_type = "dynamic")]
fn flags_of_lines(
    sums: &[f32],
    least: &[f32],
    flags: &mut [u32],
    of_blocks: &mut [f32],
    of: FlagSizes,
) {
    let mut found = Shared::<[u32]>::new_slice(comptime!(UNITS));
    let mut totals = Shared::<[f32]>::new_slice(comptime!(UNITS));
    let unit = UNIT_POS as usize;
    let lane = unit % comptime!(LANES);
    let own = ABSOLUTE_POS / comptime!(LANES);
    let at = own.min(of.count - 1);
    let line = at / of.flags;
    let flag = at % of.flags;
    let is_second = line % 2 == 1;
    let forced = select(is_second, of.forced_second, of.forced);
    let least = least[line];
    // Half-open range of the flag.
    let mut from = flag * of.block;
    let mut to = from + of.block;
    if is_second {
        // Distance from the first query to the first key, plus one block.
        let apart = of.first + flag * of.block;
        to = apart;
        from = (apart + 1).max(2 * of.block) - 2 * of.block;
    }
    // The later half of the distances between two blocks.
    let summed = select(is_second, to.max(of.block) - of.block, from);
    to = to.min(of.keys);
    let mut is_any = 0u32.runtime();
    let mut total = 0.0f32.runtime();
    let mut place = from + lane;
    while place < to {
        let number = sums[line * of.keys + place];
        if place < forced || is_kept(number, least) {
            is_any = 1u32;
        }
        total += select(place >= summed, number, 0.0f32);
        place += comptime!(LANES);
    }
    found[unit] = is_any;
    totals[unit] = total;
    sync_cube();
    if lane == 0 && own < of.count {
        for other in 1..comptime!(LANES) {
            is_any |= found[unit + other];
            total += totals[unit + other];
        }
        flags[at] = is_any;
        of_blocks[at] = total;
    }
}

/// Computes flags from block sums. `of_blocks` and `flags` are `[lists, 2, len]`, `least` `[lists, 2]`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn flags_of_blocks(of_blocks: &[f32], least: &[f32], flags: &mut [u32], len: usize, count: usize) {
    let at = ABSOLUTE_POS;
    if at < count {
        let line = at / len;
        let own = select(
            line % 2 == 1,
            comptime!(OWN[1]).runtime(),
            comptime!(OWN[0]).runtime(),
        );
        let is_one = at % len < own || is_kept(of_blocks[at], least[line]);
        flags[at] = select(is_one, 1u32, 0u32);
    }
}

/// Sizes of the scores.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ScoreSizes {
    pub rows: usize,
    pub first: usize,
    pub blocks: usize,
    flags: usize,
    /// Flag of the distances between a query block and the key block of the same index.
    same: i32,
    pub count: usize,
}

/// Returns whether a block has a selected key or distance.
#[cube]
pub(crate) fn is_touched(
    flags: &[u32],
    list: usize,
    row: usize,
    block: usize,
    of: &ScoreSizes,
) -> bool {
    let start = list * 2 * of.flags;
    let apart = row as i32 - block as i32 + of.same;
    let is_there = apart >= 0i32 && apart < of.flags as i32;
    let at = select(is_there, apart, 0i32) as usize;
    let by_distance = is_there && flags[start + of.flags + at] != 0u32;
    flags[start + block] != 0u32 || by_distance
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn touched_scores(flags: &[u32], out: &mut [f32], of: ScoreSizes) {
    let at = ABSOLUTE_POS;
    if at < of.count {
        let block = at % of.blocks;
        let row = at / of.blocks % of.rows + of.first;
        let list = at / of.blocks / of.rows;
        let is_one = is_touched(flags, list, row, block, &of);
        out[at] = select(is_one, 1.0f32, 0.0f32);
    }
}
