//! Top-k choices of key blocks by single queries: the blocks that each query chooses, and for each block the queries that chose it.
//!
//! ```text
//! highest    scores of queries             -> each query's top-k blocks, among those before its own
//! count      chosen blocks, in parts       -> number of choices per block and part
//! starts     counts                        -> first place of each block's queries, at the start of a tile; block of each tile
//! fill       chosen blocks, counts, starts -> place of each choice, and the choice at each place
//! ```
//!
//! Choices are numbered in memory order: `query · most` plus the index among the query's. A part is a range of choices, and a cube has a part. The place of
//! a choice follows from the number of choices of its block in earlier parts, plus those before it in its own part. No two units add to the same counter,
//! so the same choices give the same lists.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{UNITS, cubes, units};
use crate::args::buffer;
use crate::error::KernelError;
use crate::limits::most_units;
use crate::shared::order_key::key;

/// Units per cube that has a part, or a list.
pub(super) const LIST_UNITS: usize = 256;

/// Largest number of blocks that a query chooses in one pass over its scores.
const AT_A_TIME: usize = 4;

/// Choices of a part in shared memory at a time.
const CHUNK: usize = 512;

/// Largest number of parts per list. A unit of `starts` reads them in sequence, and their counts take memory.
const MOST_PARTS: usize = 64;

/// Sizes of the scores of rows of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScoredRows {
    /// Number of lists: batch entries times heads.
    pub lists: usize,
    /// Queries per list that have scores here.
    pub rows: usize,
    /// Position of the first of these queries, with the last query aligned to the last key. It may be negative.
    pub position: i64,
    /// Number of key blocks.
    pub blocks: usize,
    /// Keys per block.
    pub block: usize,
    /// Largest number of blocks that a query chooses.
    pub most: usize,
}

impl ScoredRows {
    /// Sizes of `lists` lists of `rows` rows from `position` on, with `blocks` blocks of `block` keys, of which a row chooses `most`.
    pub fn new(
        [lists, rows]: [usize; 2],
        position: i64,
        [blocks, block]: [usize; 2],
        most: usize,
    ) -> Self {
        Self {
            lists,
            rows,
            position,
            blocks,
            block,
            most,
        }
    }
}

/// Sizes of the lists of queries by blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListSizes {
    /// Number of lists: batch entries times heads.
    pub lists: usize,
    /// Choices per list: queries times the largest number of choices of a query.
    pub choices: usize,
    /// Number of key blocks.
    pub blocks: usize,
    /// Places per tile.
    pub tile: usize,
    /// Tiles per list, enough for all choices.
    pub tiles: usize,
}

impl ListSizes {
    /// Sizes of `lists` lists with `choices` choices among `blocks` blocks, in `tiles` tiles of `tile` places.
    pub fn new([lists, choices, blocks]: [usize; 3], [tiles, tile]: [usize; 2]) -> Self {
        Self {
            lists,
            choices,
            blocks,
            tile,
            tiles,
        }
    }

    fn places(&self) -> usize {
        self.tiles * self.tile
    }

    /// Returns the choices per part, a multiple of [`CHUNK`], and the number of parts.
    fn parts(&self) -> [usize; 2] {
        let part = self.choices.div_ceil(MOST_PARTS).next_multiple_of(CHUNK);
        [part, self.choices.div_ceil(part).max(1)]
    }
}

/// Buffers of the lists of queries by blocks: i32, −1 for none.
#[derive(Clone, Copy, Debug)]
pub struct ListBuffers<'a> {
    /// Place of each choice: `[lists, choices]`.
    pub places: &'a Handle,
    /// Choice at each place: `[lists, tiles · tile]`.
    pub choices: &'a Handle,
    /// Block of each tile: `[lists, tiles]`.
    pub tile_blocks: &'a Handle,
}

/// Finds the `most` blocks with the highest `scores` of each row, among those before the block of the row's own position, in descending order. `picks` is
/// `[lists, rows, most]`, i32, −1 if there are fewer. Of equal scores, the earlier block comes first, and NaN is lowest. `scores` is
/// `[lists, rows, blocks]`, f32.
///
/// # Errors
/// [`KernelError`] if the scores do not fit 32 bits.
pub fn highest_blocks(
    client: &Client,
    of: &ScoredRows,
    scores: &Handle,
    picks: &Handle,
) -> Result<(), KernelError> {
    let count = of.lists * of.rows;
    let len = count * of.blocks.max(of.most);
    within("the scores of queries", len)?;
    let rows = RowsLaunch::new(
        count,
        of.rows,
        of.position as i32,
        of.blocks,
        of.block,
        of.most,
    );
    // SAFETY: a unit below `count` reads the scores of its row and writes the choices of its row.
    unsafe {
        highest::launch_unchecked(
            client,
            units(client, count),
            CubeDim::new_1d(UNITS),
            AddressType::U32,
            buffer(scores, count * of.blocks),
            buffer(picks, count * of.most),
            rows,
            of.most.clamp(1, AT_A_TIME),
        );
    }
    Ok(())
}

/// Lists the choices `picks`, `[lists, choices]`, i32, which are blocks or negative numbers. The queries that chose a block get consecutive places, in
/// order, from the first place of a tile on. Writes the place of each choice, and the choice at each place. Unneeded tiles come last.
///
/// # Errors
/// [`KernelError`] if a buffer's elements do not fit 32 bits, or the device's cubes are too small.
pub fn list_queries(
    client: &Client,
    sizes: &ListSizes,
    picks: &Handle,
    lists: &ListBuffers,
) -> Result<(), KernelError> {
    check_units(client)?;
    let [part, parts] = sizes.parts();
    let all = sizes.lists * sizes.choices.max(sizes.places());
    within("the queries of lists", all)?;
    let counts = sizes.lists * parts * sizes.blocks;
    within("the counts of lists", counts)?;
    let starts = sizes.lists * sizes.blocks;
    let made = |len: usize| client.empty(len.max(1) * size_of::<u32>());
    let (counted, started) = (made(counts), made(starts));
    let (picks, places, choices, tile_blocks) = (
        || buffer(picks, sizes.lists * sizes.choices),
        || buffer(lists.places, sizes.lists * sizes.choices),
        || buffer(lists.choices, sizes.lists * sizes.places()),
        || buffer(lists.tile_blocks, sizes.lists * sizes.tiles),
    );
    let shape = || {
        PartsLaunch::new(
            sizes.lists,
            sizes.choices,
            sizes.blocks,
            sizes.tile,
            sizes.tiles,
            part,
            parts,
        )
    };
    let (dim, address) = (CubeDim::new_1d(LIST_UNITS as u32), AddressType::U32);
    let by_part = || cubes(client, sizes.lists * parts);
    // SAFETY: cubes beyond the last part or list write nothing. A cube reads the choices of its part, and writes its part's counts and places, the places
    // that `starts` assigns to its choices (below `tiles · tile`, which is checked), and its own share of all places.
    unsafe {
        count::launch_unchecked(
            client,
            by_part(),
            dim,
            address,
            picks(),
            buffer(&counted, counts),
            choices(),
            shape(),
        );
        starts_of::launch_unchecked(
            client,
            cubes(client, sizes.lists),
            dim,
            address,
            buffer(&counted, counts),
            buffer(&started, starts),
            tile_blocks(),
            shape(),
        );
        fill::launch_unchecked(
            client,
            by_part(),
            dim,
            address,
            picks(),
            buffer(&counted, counts),
            buffer(&started, starts),
            places(),
            choices(),
            shape(),
        );
    }
    Ok(())
}

/// Checks that cubes can have [`LIST_UNITS`] units.
pub(super) fn check_units(client: &Client) -> Result<(), KernelError> {
    let most = most_units(client.properties()) as u32;
    KernelError::check("units of a cube that lists queries", most, LIST_UNITS)
}

pub(super) fn within(what: &'static str, len: usize) -> Result<(), KernelError> {
    KernelError::check(what, i32::MAX as u32, len)
}

/// Sizes of rows of scores.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Rows {
    /// Rows of all lists.
    count: usize,
    /// Rows per list.
    rows: usize,
    /// Position of a list's first row.
    position: i32,
    blocks: usize,
    block: usize,
    most: usize,
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn highest(scores: &[u32], picks: &mut [i32], of: Rows, #[comptime] at_a_time: usize) {
    let row = ABSOLUTE_POS;
    if row < of.count {
        let position = max((row % of.rows) as i32 + of.position, 0i32) as usize;
        // Blocks before the row's own.
        let candidates = (position / of.block).min(of.blocks);
        let start = row * of.blocks;
        // The last chosen block. Blocks that follow have a lower key, or the same key and a later index.
        let mut bound = 0xffff_ffffu32.runtime();
        let mut from = 0usize.runtime();
        let mut keys = Array::<u32>::new(at_a_time);
        let mut blocks = Array::<i32>::new(at_a_time);
        let mut pick = 0usize.runtime();
        while pick < of.most {
            #[unroll]
            for i in 0..at_a_time {
                keys[i] = 0u32.runtime();
                blocks[i] = (-1i32).runtime();
            }
            for block in 0..candidates {
                let mut key = key(scores[start + block]);
                let follows = key < bound || (key == bound && block >= from);
                // A key below all of them is not inserted.
                if follows && key > keys[comptime!(at_a_time - 1)] {
                    let mut its = block as i32;
                    let mut is_in = false.runtime();
                    #[unroll]
                    for i in 0..at_a_time {
                        // From its index on, the others move down.
                        is_in = is_in || key > keys[i];
                        let (here, other) = (keys[i], blocks[i]);
                        keys[i] = select(is_in, key, here);
                        blocks[i] = select(is_in, its, other);
                        key = select(is_in, here, key);
                        its = select(is_in, other, its);
                    }
                }
            }
            #[unroll]
            for i in 0..at_a_time {
                if pick + i < of.most {
                    picks[row * of.most + pick + i] = blocks[i];
                }
            }
            bound = keys[comptime!(at_a_time - 1)];
            from = (blocks[comptime!(at_a_time - 1)] + 1i32) as usize;
            pick += at_a_time;
        }
    }
}

/// Sizes of choices in parts.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Parts {
    pub lists: usize,
    /// Choices per list.
    pub choices: usize,
    pub blocks: usize,
    pub tile: usize,
    pub tiles: usize,
    /// Choices per part.
    pub part: usize,
    /// Parts per list.
    pub parts: usize,
}

/// Loads the choices of a part from `first` on, with −1 after the last.
#[cube]
fn load(picks: &[i32], chunk: &mut [i32], list: usize, first: usize, of: &Parts) {
    let mut at = UNIT_POS as usize;
    while at < comptime!(CHUNK) {
        let choice = first + at;
        chunk[at] = -1i32;
        if choice < of.choices {
            chunk[at] = picks[list * of.choices + choice];
        }
        at += comptime!(LIST_UNITS);
    }
}

/// Returns how many of the first `end` choices of a chunk chose a block.
// A slice in a kernel has no iterator.
#[allow(clippy::needless_range_loop)]
#[cube]
fn chosen(chunk: &[i32], block: i32, end: usize) -> u32 {
    let mut count = 0u32.runtime();
    for at in 0..end {
        count += select(chunk[at] == block, 1u32, 0u32);
    }
    count
}

/// Computes `counts` `[lists, parts, blocks]`, and sets all places to −1.
#[cube(launch_unchecked, address_type = "dynamic")]
fn count(picks: &[i32], counts: &mut [u32], choices: &mut [i32], of: Parts) {
    // Every unit of a cube reaches every barrier. Cubes beyond the last part have no blocks and no places.
    let last = of.lists * of.parts - 1;
    let at_part = CUBE_POS.min(last);
    let is_part = CUBE_POS <= last;
    let (list, part) = (at_part / of.parts, at_part % of.parts);
    let blocks = select(is_part, of.blocks, 0usize);
    let mut chunk = Shared::<[i32]>::new_slice(comptime!(CHUNK));
    let own = at_part * of.blocks;
    let mut block = UNIT_POS as usize;
    while block < blocks {
        counts[own + block] = 0u32;
        block += comptime!(LIST_UNITS);
    }
    for step in 0..of.part / comptime!(CHUNK) {
        let first = part * of.part + step * comptime!(CHUNK);
        load(picks, &mut chunk, list, first, &of);
        sync_cube();
        let mut block = UNIT_POS as usize;
        while block < blocks {
            counts[own + block] += chosen(&chunk, block as i32, comptime!(CHUNK).runtime());
            block += comptime!(LIST_UNITS);
        }
        sync_cube();
    }
    let places = of.tiles * of.tile;
    let share = places.div_ceil(of.parts);
    let end = select(is_part, (part * share + share).min(places), 0usize);
    let mut place = part * share + UNIT_POS as usize;
    while place < end {
        choices[list * places + place] = -1i32;
        place += comptime!(LIST_UNITS);
    }
}

/// Turns `counts` into prefix sums over the parts of each block. Computes `starts` `[lists, blocks]`, the first place of each block, and the block of each
/// tile.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn starts_of(
    counts: &mut [u32],
    starts: &mut [u32],
    tile_blocks: &mut [i32],
    of: Parts,
) {
    let is_list = CUBE_POS < of.lists;
    let list = CUBE_POS.min(of.lists - 1);
    let blocks = select(is_list, of.blocks, 0usize);
    let unit = UNIT_POS as usize;
    let mut tiles_of = Shared::<[u32]>::new_slice(comptime!(LIST_UNITS));
    // A unit has consecutive blocks, so that the blocks of earlier units come before.
    let own = of.blocks.div_ceil(comptime!(LIST_UNITS));
    let first = (unit * own).min(blocks);
    let end = (first + own).min(blocks);
    let mut tiles = 0u32.runtime();
    for block in first..end {
        let mut before = 0u32.runtime();
        for part in 0..of.parts {
            let at = (list * of.parts + part) * of.blocks + block;
            let count = counts[at];
            counts[at] = before;
            before += count;
        }
        let needed = before.div_ceil(of.tile as u32);
        starts[list * of.blocks + block] = needed;
        tiles += needed;
    }
    tiles_of[unit] = tiles;
    sync_cube();
    let mut next = 0u32.runtime();
    let mut all = 0u32.runtime();
    for other in 0..comptime!(LIST_UNITS) {
        let tiles = tiles_of[other];
        next += select(other < unit, tiles, 0u32);
        all += tiles;
    }
    for block in first..end {
        let at = list * of.blocks + block;
        let needed = starts[at];
        starts[at] = next * of.tile as u32;
        for tile in 0..needed {
            let tile = (next + tile) as usize;
            if tile < of.tiles {
                tile_blocks[list * of.tiles + tile] = block as i32;
            }
        }
        next += needed;
    }
    let mut tile = all as usize + unit;
    while is_list && tile < of.tiles {
        tile_blocks[list * of.tiles + tile] = -1i32;
        tile += comptime!(LIST_UNITS);
    }
}

/// Computes the places of the choices of a part, and writes the choices to them.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fill(
    picks: &[i32],
    counts: &mut [u32],
    starts: &[u32],
    places: &mut [i32],
    choices: &mut [i32],
    of: Parts,
) {
    let last = of.lists * of.parts - 1;
    let at_part = CUBE_POS.min(last);
    let is_part = CUBE_POS <= last;
    let (list, part) = (at_part / of.parts, at_part % of.parts);
    let (blocks, end) = (
        select(is_part, of.blocks, 0usize),
        select(is_part, of.choices, 0usize),
    );
    let room = of.tiles * of.tile;
    let own = at_part * of.blocks;
    let mut chunk = Shared::<[i32]>::new_slice(comptime!(CHUNK));
    for step in 0..of.part / comptime!(CHUNK) {
        let first = part * of.part + step * comptime!(CHUNK);
        load(picks, &mut chunk, list, first, &of);
        sync_cube();
        let mut at = UNIT_POS as usize;
        while at < comptime!(CHUNK) {
            let choice = first + at;
            if choice < end {
                let block = chunk[at];
                let mut place = (-1i32).runtime();
                if block >= 0i32 && (block as usize) < of.blocks {
                    let before = counts[own + block as usize] + chosen(&chunk, block, at);
                    let to = (starts[list * of.blocks + block as usize] + before) as usize;
                    // All choices fit, if their number is as the sizes say.
                    if to < room {
                        place = to as i32;
                        choices[list * room + to] = choice as i32;
                    }
                }
                places[list * of.choices + choice] = place;
            }
            at += comptime!(LIST_UNITS);
        }
        sync_cube();
        // The next chunk's places come after this chunk's. Other units of the cube read the counts.
        let mut block = UNIT_POS as usize;
        while block < blocks {
            counts[own + block] += chosen(&chunk, block as i32, comptime!(CHUNK).runtime());
            block += comptime!(LIST_UNITS);
        }
        sync_storage();
    }
}
