//! The words of a plan in one launch, where patterns have few tiles: the steps of [`words`](super::words), a cube a pattern.

use cubecl::prelude::*;

use super::words::{Cut, Extent, Heads, Places, counted, listed, table_word};

/// Tiles of a pattern, at most: their steps are in shared memory, and each is compared with all.
pub const MOST_TILES: usize = 1024;

/// Units of a cube, at most.
const MOST_UNITS: usize = 512;

/// What is compiled into the kernel, besides the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Once {
    /// Units of a cube.
    pub units: usize,
    /// Numbers of shared memory: no fewer than a pattern's tiles.
    pub tiles: usize,
}

impl Once {
    /// For patterns of so many tiles. `None` if they are too many.
    pub fn new(properties: &DeviceProperties, tiles: usize) -> Option<Self> {
        let hardware = &properties.hardware;
        let most = (hardware.max_units_per_cube as usize).min(hardware.max_cube_dim.0 as usize);
        let most = most.min(MOST_UNITS);
        (tiles <= MOST_TILES && most >= 32).then(|| {
            let tiles = tiles.next_power_of_two().max(32);
            let units = tiles.min(1 << most.ilog2());
            Self { units, tiles }
        })
    }
}

/// Tiles, their order and their entries; and the tables, whose words all cubes share.
#[cube(launch_unchecked, address_type = "dynamic")]
pub fn at_once(
    bits: &[u32],
    plan: &mut [u32],
    extent: Extent,
    places: Places,
    heads: Heads,
    patterns: usize,
    tables: usize,
    #[comptime] cut: Cut,
    #[comptime] once: Once,
) {
    // Cubes beyond the last pattern have no tiles, but meet the barriers.
    let pattern = CUBE_POS.min(patterns - 1);
    let tiles = select(CUBE_POS < patterns, extent.tiles, 0usize);
    let unit = UNIT_POS as usize;
    let mut steps = Shared::<[u32]>::new_slice(comptime!(once.tiles));
    let mut sums = Shared::<[u32]>::new_slice(comptime!(once.units));

    // A unit has neighbouring tiles, so that what earlier units have is what comes before.
    let own = extent.tiles.div_ceil(comptime!(once.units));
    let first = (unit * own).min(tiles);
    let end = (first + own).min(tiles);
    let first_tile = pattern * extent.tiles;
    let mut sum = 0u32.runtime();
    for tile in first..end {
        let counted = counted(bits, first_tile + tile, &extent, cut);
        plan[places.tiles + (first_tile + tile) * 3 + 2] = counted.masked;
        steps[tile] = counted.steps;
        sum += counted.steps;
    }
    sums[unit] = sum;
    sync_cube();

    let mut before = 0u32.runtime();
    for other in 0..unit {
        before += sums[other];
    }
    for tile in first..end {
        let at = first_tile + tile;
        let record = places.tiles + at * 3;
        let own_steps = steps[tile];
        let entry = (pattern * extent.room) as u32 + before * comptime!(cut.per_step as u32);
        before += own_steps;
        let mut rank = first_tile;
        for other in 0..tiles {
            let others = steps[other];
            if others > own_steps || (others == own_steps && other < tile) {
                rank += 1;
            }
        }
        plan[record] = entry;
        plan[record + 1] = own_steps;
        let target = places.order + rank * 4;
        plan[target] = tile as u32;
        plan[target + 1] = entry;
        plan[target + 2] = own_steps;
        plan[target + 3] = plan[record + 2];
        let first_word = places.entries + entry as usize * 2;
        listed(bits, plan, at, first_word, own_steps, &extent, cut);
    }

    let mut word = ABSOLUTE_POS;
    while word < tables {
        table_word(plan, word, &extent, &places, &heads, cut);
        word += CUBE_COUNT * comptime!(once.units);
    }
}
