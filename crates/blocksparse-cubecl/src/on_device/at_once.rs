//! The words of a plan in one launch, for patterns with few tiles: the steps of [`words`](super::words), with several cubes per pattern.
//!
//! ```text
//! count     counts the entries of all tiles, in each cube of the pattern          consecutive tiles per unit
//! first     sums the steps of earlier tiles                                       in shared memory
//! rank      compares the cube's own tiles with all tiles                          one or more units per tile
//! entries   lists entries of the cube's own tiles, after those of earlier words   one or more words per unit
//! tables    makes the tables, distributed over all cubes
//! ```

use cubecl::prelude::*;

use super::tables::{Heads, table_word};
use super::words::{Cut, Extent, Places, counted, entries_of, filled, listed_words, place};
use crate::limits::most_units;

/// Largest number of tiles per pattern. Their steps are in shared memory, and each tile is compared with all.
pub const MOST_TILES: usize = 1024;

/// Least (if the device has as many) and largest number of units per cube.
const UNITS: [usize; 2] = [128, 512];

/// Least number of tiles that a cube lists.
const FEWEST_OWN: usize = 8;

/// Assumed number of multiprocessors if the device does not report it.
const MULTIPROCESSORS: usize = 16;

/// Compile-time parameters of the kernel besides the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Once {
    /// Units per cube.
    pub units: usize,
    /// Elements of the shared arrays: at least the tiles of a pattern.
    pub tiles: usize,
}

impl Once {
    /// Returns the parameters for patterns with `tiles` tiles, or `None` if they are too many.
    pub fn new(properties: &DeviceProperties, tiles: usize) -> Option<Self> {
        let hardware = &properties.hardware;
        let most = most_units(properties);
        let [fewest, units] = UNITS.map(|units| units.min(1 << most.ilog2()));
        let tiles = tiles.next_power_of_two().max(32);
        let once = Self {
            units: tiles.clamp(fewest, units),
            tiles,
        };
        let bytes = (3 * once.tiles + 2 * once.units) * size_of::<u32>();
        let fits = bytes <= hardware.max_shared_memory_size;
        (tiles <= MOST_TILES && most >= 32 && fits).then_some(once)
    }

    /// Returns the cubes per pattern, such that there are about two cubes per multiprocessor in all.
    pub fn shares(properties: &DeviceProperties, patterns: usize, tiles: usize) -> usize {
        let known = properties.hardware.num_streaming_multiprocessors;
        let multiprocessors = known.map_or(MULTIPROCESSORS, |count| count as usize);
        (2 * multiprocessors / patterns.max(1)).clamp(1, tiles.div_ceil(FEWEST_OWN).max(1))
    }
}

/// Makes tiles, their order and their entries, and the tables, whose words are distributed over all cubes. A pattern has `shares` cubes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn at_once(
    bits: &[u32],
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    heads: Heads,
    patterns: usize,
    shares: usize,
    tables: usize,
    #[comptime] cut: Cut,
    #[comptime] once: Once,
) {
    let units = comptime!(once.units);
    let per_step = comptime!(cut.per_step);
    let at = CUBE_POS.min(patterns * shares - 1);
    let pattern = at / shares;
    // Cubes beyond the last pattern have no tiles, but reach the barriers.
    let tiles = select(CUBE_POS < patterns * shares, extent.tiles, 0usize);
    let first_tile = pattern * extent.tiles;
    let unit = UNIT_POS as usize;
    let mut steps = Shared::<[u32]>::new_slice(once.tiles);
    let mut masked = Shared::<[u32]>::new_slice(once.tiles);
    // Steps of the previous tiles.
    let mut firsts = Shared::<[u32]>::new_slice(once.tiles);
    let mut sums = Shared::<[u32]>::new_slice(comptime!(2 * once.units));

    // A unit has consecutive tiles, so that the tiles of earlier units come before.
    let own = extent.tiles.div_ceil(units);
    let first = (unit * own).min(tiles);
    let end = (first + own).min(tiles);
    let mut sum = 0u32.runtime();
    for tile in first..end {
        let counted = counted(bits, first_tile + tile, &extent, cut);
        steps[tile] = counted.steps;
        masked[tile] = counted.masked;
        sum += counted.steps;
    }
    // Prefix sums by doubling: over one unit, two, four and so on.
    sums[unit] = sum;
    sync_cube();
    #[unroll]
    for doubling in 0..comptime!(once.units.ilog2()) {
        let (from, to, apart) = comptime!((
            (doubling as usize % 2) * once.units,
            (doubling as usize + 1) % 2 * once.units,
            1usize << doubling
        ));
        let mut with = sums[unit + from];
        if unit >= apart {
            with += sums[unit + from - apart];
        }
        sums[unit + to] = with;
        sync_cube();
    }
    let mut before = sums[unit + comptime!(once.units.ilog2() as usize % 2 * once.units)] - sum;
    for tile in first..end {
        firsts[tile] = before;
        before += steps[tile];
    }
    sync_cube();

    // The cube's own tiles.
    let own_tiles = extent.tiles.div_ceil(shares);
    let from_tile = (at % shares * own_tiles).min(tiles);
    let to_tile = (from_tile + own_tiles).min(tiles);
    let all_units = comptime!(once.units).runtime();
    let parts = (all_units / own_tiles).max(1);
    let together = all_units / parts;
    let segment = extent.tiles.div_ceil(parts);
    for round in 0..own_tiles.div_ceil(together) {
        let tile = from_tile + round * together + unit / parts;
        let part = unit % parts;
        let is_own = unit / parts < together && tile < to_tile;
        let mut longer = 0u32.runtime();
        if is_own {
            let own_steps = steps[tile];
            let first = (part * segment).min(tiles);
            for other in first..(first + segment).min(tiles) {
                let others = steps[other];
                if others > own_steps || (others == own_steps && other < tile) {
                    longer += 1;
                }
            }
        }
        sums[unit] = longer;
        sync_cube();
        if is_own && part == 0 {
            let mut rank = first_tile;
            for other in 0..parts {
                rank += sums[unit + other] as usize;
            }
            let entry =
                (pattern * extent.room) as u32 + firsts[tile] * comptime!(cut.per_step as u32);
            let record = places.tiles + (first_tile + tile) * 3;
            plan[record] = entry;
            plan[record + 1] = steps[tile];
            plan[record + 2] = masked[tile];
            let target = places.order + rank * 4;
            plan[target] = tile as u32;
            plan[target + 1] = entry;
            plan[target + 2] = steps[tile];
            plan[target + 3] = masked[tile];
        }
        sync_cube();
    }

    let lanes = extent.words.min(units);
    let each = extent.words.div_ceil(lanes);
    let together = all_units / lanes;
    for round in 0..own_tiles.div_ceil(together) {
        let tile = from_tile + round * together + unit / lanes;
        let lane = unit % lanes;
        let is_own = unit / lanes < together && tile < to_tile;
        let from = (lane * each).min(extent.words);
        let to = (from + each).min(extent.words);
        let place = place(first_tile + tile.min(extent.tiles - 1), &extent, cut);
        let mut own_masked = 0u32.runtime();
        let mut own_full = 0u32.runtime();
        if is_own {
            let entries = entries_of(bits, &place, from, to, &extent, cut);
            own_masked = entries.masked;
            own_full = entries.full;
        }
        sums[unit] = own_masked;
        sums[unit + units] = own_full;
        sync_cube();
        if is_own {
            // Counts of the previous words.
            let mut masked_before = 0u32.runtime();
            let mut full_before = 0u32.runtime();
            for other in 0..lane {
                masked_before += sums[unit - lane + other];
                full_before += sums[unit + units - lane + other];
            }
            let entry = pattern * extent.room + firsts[tile] as usize * per_step;
            let first = places.entries + entry * 2;
            let end = first + steps[tile] as usize * comptime!(2 * cut.per_step);
            let front = first + masked_before as usize * 2;
            let back = end - full_before as usize * 2;
            let gap = listed_words(bits, plan, &place, from, to, front, back, &extent, cut);
            if lane + 1 == lanes {
                filled(plan, gap.front, gap.back);
            }
        }
        sync_cube();
    }

    let mut word = ABSOLUTE_POS;
    while word < tables {
        table_word(plan, word, &extent, &places, &heads, cut);
        word += CUBE_COUNT * units;
    }
}
