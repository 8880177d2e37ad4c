//! The pages of the highest scores.
//!
//! Nothing is sorted. Scores in their order are whole numbers in the same order ([`key`]), of which the `m`-th largest is found from its highest bits on:
//!
//! ```text
//! v = 0
//! for two bits at a time    v = the largest of v, v + b, v + 2b, v + 3b that at least m numbers reach
//! kept: those above v, and the first of those that equal it, up to m
//! ```
//!
//! A cube has a row, whose units hold neighbouring blocks each. How many numbers reach a bound is a sum over the cube, one barrier each where there are
//! planes; where the blocks that are kept go is what units before a unit keep.

// A kernel's integers have no such method.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::ir::features::Plane;
use cubecl::prelude::*;
use cubecl::server::Handle;

use blocksparse::Always;
use blocksparse_cubecl::args::{address_of, buffer, spread};
use blocksparse_cubecl::error::KernelError;
use blocksparse_cubecl::shared::order_key::key;

/// Units of a row, at least and at most.
const UNITS: [usize; 2] = [32, 1024];
/// Blocks of a unit where units are between these.
const UNIT_BLOCKS: usize = 8;
/// Blocks that a unit holds, at most; of longer rows it reads them again.
const MOST_HELD: usize = 32;
/// Units that are counted together where there are no planes, and where places are made.
const TOGETHER: usize = 16;
/// Bounds of a step: all that two bits can be but 0.
const BOUNDS: usize = 3;

/// What a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct HighestShape {
    /// Walks.
    pub batch: usize,
    /// Heads of keys.
    pub kv_heads: usize,
    /// Rows of the table of a walk: 1 or `kv_heads`.
    pub tables: usize,
    /// Entries of a row of the table, which have scores.
    pub entries: usize,
    /// Slots of a page.
    pub page: usize,
    /// Pages of a block: they are kept together, by the sum of their scores.
    pub block: usize,
    /// Blocks that are kept, the forced ones among them (more, if more are forced).
    pub keep: usize,
    /// Blocks that are kept whatever their score: the first, and up to the one in which a walk ends, which is always one of them.
    pub forced: Always,
}

impl HighestShape {
    /// `[batch, kv_heads]`, `[tables, entries]`, slots of a page, pages of a block, and how many blocks are kept, that in which a walk ends alone
    /// whatever its score.
    pub fn new(
        [batch, kv_heads]: [usize; 2],
        [tables, entries]: [usize; 2],
        page: usize,
        [block, keep]: [usize; 2],
    ) -> Self {
        Self {
            batch,
            kv_heads,
            tables,
            entries,
            page,
            block,
            keep,
            forced: Always { first: 0, local: 1 },
        }
    }

    /// Sets which blocks are kept whatever their score.
    pub fn forced(mut self, forced: Always) -> Self {
        self.forced = Always {
            // What lies behind a walk's pages has no score.
            local: forced.local.max(1),
            ..forced
        };
        self
    }

    fn forced_blocks(&self) -> usize {
        self.forced.first.saturating_add(self.forced.local)
    }

    /// Blocks that are chosen by score, at most.
    fn chosen(&self) -> usize {
        self.keep.saturating_sub(self.forced_blocks())
    }

    /// Blocks that have a place in a list.
    fn kept(&self) -> usize {
        self.keep.max(self.forced_blocks())
    }

    /// Pages that are listed for each walk.
    fn listed(&self) -> usize {
        self.kept().saturating_mul(self.block)
    }
}

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Picked {
    /// Units of a cube, a power of two.
    units: usize,
    /// Units of a plane, 1 on a device without plane operations.
    plane: usize,
    /// Blocks that a unit holds, 0 if they are too many.
    held: usize,
    /// Pages of a block.
    block: usize,
    /// Slots of a page.
    page: usize,
}

impl Picked {
    /// Units that are counted together first.
    fn together(&self) -> usize {
        match self.plane > 1 {
            true => self.plane,
            false => TOGETHER,
        }
    }

    /// How many such there are.
    fn groups(&self) -> usize {
        self.units / self.together()
    }
}

#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    rows: usize,
    kv_heads: usize,
    tables: usize,
    entries: usize,
    /// Blocks that are chosen by score, at most, and those that have a place in a list.
    chosen: usize,
    kept: usize,
    /// Forced ones: the first, and up to the last of a walk.
    first: usize,
    local: usize,
}

/// The number by which a block is kept.
#[cube]
fn key_of(scores: &[f32], row: usize, block: usize, #[comptime] t: Picked) -> u32 {
    let first = row + block * comptime!(t.block);
    let mut score = scores[first];
    for page in 1..comptime!(t.block) {
        score += scores[first + page];
    }
    key(u32::reinterpret(score))
}

/// Writes the pages of a block that is kept.
#[cube]
fn list(picks: &mut [i32], into: usize, place: usize, block: usize, #[comptime] t: Picked) {
    for page in 0..comptime!(t.block) {
        let entry = block * comptime!(t.block) + page;
        picks[into + place * comptime!(t.block) + page] = entry as i32;
    }
}

/// Writes where a block stands in the list of its row, counted through those of a group, or −1.
#[cube]
#[allow(clippy::too_many_arguments)]
fn note(
    places: &mut ComptimeOption<Box<[i32]>>,
    row: usize,
    block: usize,
    end: usize,
    is_kept: bool,
    place: usize,
    sizes: &Sizes,
) {
    #[comptime]
    match places {
        ComptimeOption::Some(places) => {
            if block < end {
                let listed = row % sizes.kv_heads * sizes.chosen + place;
                places[row * sizes.entries + block] = select(is_kept, listed as i32, -1i32);
            }
        }
        ComptimeOption::None => {}
    }
}

/// How many of all units' numbers reach each of three bounds: `counts` of a unit become those of the cube. `totals` has a half for even steps and one for
/// odd ones, so that none overwrites what another unit still reads.
#[cube]
fn across_units(
    counts: &mut Array<u32>,
    partial: &mut [u32],
    totals: &mut [u32],
    step: usize,
    #[comptime] t: Picked,
) {
    let unit = UNIT_POS as usize;
    let half = step % 2 * comptime!(BOUNDS * t.groups());
    if comptime!(t.plane > 1) {
        #[unroll]
        for step in 0..comptime!(t.plane.ilog2()) {
            #[unroll]
            for i in 0..comptime!(BOUNDS) {
                counts[i] += plane_shuffle_xor(counts[i], comptime!(1u32 << step));
            }
        }
        if unit % comptime!(t.plane) == 0 {
            #[unroll]
            for i in 0..comptime!(BOUNDS) {
                totals[half + unit / comptime!(t.plane) * comptime!(BOUNDS) + i] = counts[i];
            }
        }
    } else {
        #[unroll]
        for i in 0..comptime!(BOUNDS) {
            partial[unit * comptime!(BOUNDS) + i] = counts[i];
        }
        sync_cube();
        if unit < comptime!(t.groups()) {
            #[unroll]
            for i in 0..comptime!(BOUNDS) {
                let mut sum = 0u32.runtime();
                for other in 0..comptime!(t.together()) {
                    let at = unit * comptime!(t.together()) + other;
                    sum += partial[at * comptime!(BOUNDS) + i];
                }
                totals[half + unit * comptime!(BOUNDS) + i] = sum;
            }
        }
    }
    sync_cube();
    #[unroll]
    for i in 0..comptime!(BOUNDS) {
        counts[i] = totals[half + i];
    }
    #[unroll]
    for group in 1..comptime!(t.groups()) {
        #[unroll]
        for i in 0..comptime!(BOUNDS) {
            counts[i] += totals[half + comptime!(group * BOUNDS + i)];
        }
    }
}

/// The forced blocks of a walk and those of the highest `scores` `[batch, kv_heads, entries]` between them, ascending, as pages:
/// `[batch, kv_heads, kept · block]` entries of the table, −1 where there are fewer.
#[cube(launch_unchecked, address_type = "dynamic")]
fn highest(
    scores: &[f32],
    spans: ComptimeOption<Box<[i32]>>,
    picks: &mut [i32],
    places: ComptimeOption<Box<[i32]>>,
    sizes: Sizes,
    #[comptime] t: Picked,
) {
    let mut places = places;
    let mut partial = Shared::<[u32]>::new_slice(comptime!(BOUNDS * t.units));
    let mut totals = Shared::<[u32]>::new_slice(comptime!(2 * BOUNDS * t.groups()));
    // Cubes beyond the last row make it again.
    let at_row = CUBE_POS.min(sizes.rows - 1);
    let unit = UNIT_POS as usize;
    let mut pages = sizes.entries;
    // Blocks that are chosen from, which are whole: those before and behind them are forced.
    let mut low = 0usize.runtime();
    let mut high = sizes.entries;
    // Blocks that have a place in the list.
    let mut listed = sizes.chosen;
    #[comptime]
    match &spans {
        ComptimeOption::Some(spans) => {
            let head = at_row % sizes.kv_heads;
            let walk = at_row / sizes.kv_heads * sizes.tables + head % sizes.tables;
            let slots = max(spans[walk * 4], 0i32) as usize;
            pages = min(
                (slots + comptime!(t.page - 1)) / comptime!(t.page),
                sizes.entries,
            );
            let walked = (max(pages, 1usize) - 1) / comptime!(t.block) + 1;
            high = walked - min(sizes.local, walked);
            low = min(sizes.first, high);
            listed = sizes.kept;
        }
        ComptimeOption::None => {}
    }
    let wanted = min(sizes.chosen, high - low);
    let row = at_row * sizes.entries;
    let own_blocks = (high - low).div_ceil(comptime!(t.units));
    let first = (low + unit * own_blocks).min(high);
    let end = (first + own_blocks).min(high);

    let mut own = Array::<u32>::new(comptime!(t.held.max(1)));
    #[unroll]
    for i in 0..comptime!(t.held) {
        let mut key = 0u32.runtime();
        if first + i < end {
            key = key_of(scores, row, first + i, t);
        }
        own[i] = key;
    }

    // Numbers of scores are above 0, so 0 reaches no bound.
    let mut bound = 0u32.runtime();
    let mut counts = Array::<u32>::new(comptime!(BOUNDS));
    for step in 0..16usize {
        let bit = 1u32 << (30u32 - 2u32 * step as u32);
        #[unroll]
        for i in 0..comptime!(BOUNDS) {
            counts[i] = 0u32.runtime();
        }
        if comptime!(t.held > 0) {
            #[unroll]
            for held in 0..comptime!(t.held) {
                #[unroll]
                for i in 0..comptime!(BOUNDS) {
                    let least = bound + bit * comptime!(i as u32 + 1u32);
                    counts[i] += select(own[held] >= least, 1u32, 0u32);
                }
            }
        } else {
            for block in first..end {
                let key = key_of(scores, row, block, t);
                #[unroll]
                for i in 0..comptime!(BOUNDS) {
                    let least = bound + bit * comptime!(i as u32 + 1u32);
                    counts[i] += select(key >= least, 1u32, 0u32);
                }
            }
        }
        across_units(&mut counts, &mut partial, &mut totals, step, t);
        let mut steps = 0u32.runtime();
        #[unroll]
        for i in 0..comptime!(BOUNDS) {
            steps += select(counts[i] >= wanted as u32, 1u32, 0u32);
        }
        bound += steps * bit;
    }

    let mut above = 0u32.runtime();
    let mut equal = 0u32.runtime();
    if comptime!(t.held > 0) {
        #[unroll]
        for held in 0..comptime!(t.held) {
            above += select(own[held] > bound, 1u32, 0u32);
            equal += select(own[held] == bound, 1u32, 0u32);
        }
    } else {
        for block in first..end {
            let key = key_of(scores, row, block, t);
            above += select(key > bound, 1u32, 0u32);
            equal += select(key == bound, 1u32, 0u32);
        }
    }
    partial[2 * unit] = above;
    partial[2 * unit + 1] = equal;
    sync_cube();
    let groups = comptime!(t.units.div_ceil(TOGETHER));
    if unit < groups {
        let mut sum = 0u32.runtime();
        let mut equals = 0u32.runtime();
        for other in 0..comptime!(TOGETHER.min(t.units)) {
            sum += partial[2 * (unit * comptime!(TOGETHER) + other)];
            equals += partial[2 * (unit * comptime!(TOGETHER) + other) + 1];
        }
        // Behind what is still read.
        partial[comptime!(2 * t.units) + 2 * unit] = sum;
        partial[comptime!(2 * t.units) + 2 * unit + 1] = equals;
    }
    sync_cube();
    let mut above_before = 0u32.runtime();
    let mut equal_before = 0u32.runtime();
    let mut above_all = 0u32.runtime();
    for group in 0..groups {
        let is_before = group < unit / comptime!(TOGETHER);
        let of_group = partial[comptime!(2 * t.units) + 2 * group];
        let equals = partial[comptime!(2 * t.units) + 2 * group + 1];
        above_all += of_group;
        above_before += select(is_before, of_group, 0u32);
        equal_before += select(is_before, equals, 0u32);
    }
    for other in unit / comptime!(TOGETHER) * comptime!(TOGETHER)..unit {
        above_before += partial[2 * other];
        equal_before += partial[2 * other + 1];
    }
    // Of those that equal the bound so many are kept.
    let left = wanted as u32 - min(above_all, wanted as u32);
    let mut place = (above_before + min(equal_before, left)) as usize;
    let mut left = left - min(equal_before, left);
    let into = at_row * listed * comptime!(t.block);
    if comptime!(t.held > 0) {
        #[unroll]
        for held in 0..comptime!(t.held) {
            let is_equal = own[held] == bound && left > 0u32;
            let is_kept = (own[held] > bound || is_equal) && place < wanted;
            note(
                &mut places,
                at_row,
                first + held,
                end,
                is_kept,
                place,
                &sizes,
            );
            if is_kept {
                list(picks, into, low + place, first + held, t);
                place += 1usize;
            }
            left -= select(is_equal, 1u32, 0u32);
        }
    } else {
        for block in first..end {
            let key = key_of(scores, row, block, t);
            let is_equal = key == bound && left > 0u32;
            let is_kept = (key > bound || is_equal) && place < wanted;
            note(&mut places, at_row, block, end, is_kept, place, &sizes);
            if is_kept {
                list(picks, into, low + place, block, t);
                place += 1usize;
            }
            left -= select(is_equal, 1u32, 0u32);
        }
    }
    // The first blocks that are forced, then the last ones, and nothing behind them.
    let mut at = unit;
    while at < low * comptime!(t.block) {
        picks[into + at] = at as i32;
        at += comptime!(t.units);
    }
    let behind = (low + wanted) * comptime!(t.block);
    let mut at = behind + unit;
    while at < listed * comptime!(t.block) {
        let entry = high * comptime!(t.block) + (at - behind);
        picks[into + at] = select(entry < pages, entry as i32, -1i32);
        at += comptime!(t.units);
    }
}

/// How it is launched.
struct Launch {
    tile: Picked,
    address: AddressType,
    cubes: CubeCount,
}

impl Launch {
    fn new(client: &Client, shape: &HighestShape) -> Result<Self, KernelError> {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let most = (hardware.max_units_per_cube as usize)
            .min(hardware.max_cube_dim.0 as usize)
            .max(1);
        let [low, high] = UNITS;
        if most < low {
            let what = "units of a cube that picks pages";
            return Err(KernelError::limit(what, most as u32, low));
        }
        let blocks = shape.entries.div_ceil(shape.block);
        let units = blocks.div_ceil(UNIT_BLOCKS).next_power_of_two();
        let units = units.clamp(low, high.min(1 << most.ilog2()));
        let held = blocks.div_ceil(units);
        let plane = hardware.plane_size_min as usize;
        let is_plane = properties.features.plane.contains(Plane::Ops)
            && hardware.plane_size_min == hardware.plane_size_max
            && plane.is_power_of_two()
            && plane <= units;
        let rows = shape.batch * shape.kv_heads;
        let largest = rows.saturating_mul(shape.entries.max(shape.listed()));
        Ok(Self {
            tile: Picked {
                units,
                plane: if is_plane { plane } else { 1 },
                held: if held <= MOST_HELD { held } else { 0 },
                block: shape.block,
                page: shape.page,
            },
            address: address_of(client, largest)?,
            cubes: spread(client, rows as u64)?,
        })
    }
}

/// That [`topk_pages`] takes a shape.
///
/// # Errors
/// As [`topk_pages`].
pub fn check_highest_pages(client: &Client, shape: &HighestShape) -> Result<(), KernelError> {
    Launch::new(client, shape).map(|_| ())
}

/// Of each walk and head of keys the blocks of pages that are forced, that in which region one ends among them, and of the others so many with the highest
/// scores that `keep` are kept: of equal ones the earlier, and NaN is the lowest. `scores` are f32 `[batch, kv_heads, entries]`, of which those of the walk's
/// pages count; `spans` are `[batch, tables, 4]`, i32; `picks` are i32 `[batch, kv_heads, kept · block]`, where `kept` is `keep`, or the number of forced blocks
/// if that is more: entries of the table, ascending, and −1 behind them. Contiguous.
///
/// # Errors
/// [`KernelError`] if the device cannot index the scores, or its cubes are too small.
pub fn topk_pages(
    client: &Client,
    shape: &HighestShape,
    scores: &Handle,
    spans: &Handle,
    picks: &Handle,
) -> Result<(), KernelError> {
    let Launch {
        tile,
        address,
        cubes,
    } = Launch::new(client, shape)?;
    let rows = shape.batch * shape.kv_heads;
    if rows * shape.entries * shape.kept() == 0 {
        return Ok(());
    }
    // More are none's, and numbers of a kernel are small.
    let blocks = shape.entries.div_ceil(shape.block);
    // SAFETY: a cube reads the scores of its row below the walk's last block and writes the picks of its row; the buffers have the lengths they say.
    unsafe {
        highest::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units as u32),
            address,
            buffer(scores, rows * shape.entries),
            ComptimeOptionArgs::Some(buffer(spans, shape.batch * shape.tables * 4)),
            buffer(picks, rows * shape.listed()),
            ComptimeOptionArgs::None,
            SizesLaunch::new(
                rows,
                shape.kv_heads,
                shape.tables,
                shape.entries,
                shape.chosen(),
                shape.kept(),
                shape.forced.first.min(blocks),
                shape.forced.local.min(blocks),
            ),
            tile,
        );
    }
    Ok(())
}

/// The columns of the `most` highest numbers of each row, of equal ones the earlier, NaN the lowest: `lists` are i32 `[groups, rows, most]`, ascending, of f32
/// `numbers` `[groups, rows, columns]`, contiguous, `most` at most as many as there are columns. `places`, i32 as `numbers`, say of each number where it stands
/// in the lists of its group, `row · most` and its place in the row's, or −1.
///
/// # Errors
/// As [`topk_pages`].
pub fn topk_rows(
    client: &Client,
    [groups, of_group, columns]: [usize; 3],
    most: usize,
    numbers: &Handle,
    [lists, places]: [&Handle; 2],
) -> Result<(), KernelError> {
    let rows = groups * of_group;
    KernelError::check_u32("the places of a group", of_group * most)?;
    let shape = HighestShape::new([rows, 1], [1, columns], 1, [1, most + 1]);
    let Launch {
        tile,
        address,
        cubes,
    } = Launch::new(client, &shape)?;
    if rows * columns * most == 0 {
        return Ok(());
    }
    // SAFETY: a cube reads the numbers of its row and writes its list; the buffers have the lengths they say.
    unsafe {
        highest::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(tile.units as u32),
            address,
            buffer(numbers, rows * columns),
            ComptimeOptionArgs::None,
            buffer(lists, rows * most),
            ComptimeOptionArgs::Some(buffer(places, rows * columns)),
            SizesLaunch::new(rows, of_group, 1, columns, most, most + 1, 0, 1),
            tile,
        );
    }
    Ok(())
}
