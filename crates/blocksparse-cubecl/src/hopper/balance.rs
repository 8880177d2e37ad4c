//! Chooses how many cubes share the queries of a tile of keys, or the steps of a long tile, so that all multiprocessors have work until the end.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::fused::{SPREAD, SPREAD_SHARES, Sizes};
use super::long_tiles::{LongTiles, MainloopPlan, Stretch};
use super::tiles::{BackwardTile, MainloopTile};
use crate::call::PartRequest;
use crate::limits::multiprocessors;
use crate::tensor::is_u32;
use crate::tuning::TierLimit;
use blocksparse::plan::{Mainloop, Tiling, tile_steps};

/// Overhead of a cube before its first and after its last step, in steps.
const CUBE: usize = 1;
/// Overhead of a cube whose sums go through memory in f32: the cube writes them and a later launch reads them.
const SHARING_CUBE: usize = 5;
/// Overhead of that launch.
const LAUNCH: usize = 2;
/// Cubes are not equally fast, because they wait for each other at the sums of dQ. The longest may take this fraction of its time longer, while the others
/// are idle.
const SLOWER: usize = 16;
/// Least factor that sharing must save.
const WORTHWHILE: f64 = 1.05;
/// With more tiles than this per multiprocessor, usually no tile is a notable part of the pass, and the sums of all of them would take much memory.
const MANY: usize = 8;
/// To be shared, the longest tile must take at least this fraction of the time of a mainloop.
const NOTABLE: usize = 20;

/// Returns the number of cubes that share each tile: a divisor of the query heads per head of keys, 1 for no sharing.
pub(super) fn shares(part: &PartRequest, tile: &BackwardTile) -> usize {
    let (layout, request) = (part.layout, part.request);
    let heads_per_kv = layout.heads() / request.kv_heads;
    let multiprocessors = multiprocessors(part.properties);
    let heads_of_keys = request.batch * request.kv_heads;
    let tiles = layout.seq_kv().div_ceil(tile.rows());
    // Tiles of a persistent cube cannot be shared.
    if part.limit == TierLimit::HopperAlone
        || heads_per_kv == 1
        || tile.persistent
        || tiles * heads_of_keys > MANY * multiprocessors
    {
        return 1;
    }
    let work = Work::new(part, tile);
    let alone = work.time(1, multiprocessors);
    let mut best = (alone as f64 / WORTHWHILE, 1);
    for shares in (2..=heads_per_kv).filter(|&shares| heads_per_kv.is_multiple_of(shares)) {
        let tile = BackwardTile { shares, ..*tile };
        let sizes = Sizes::new(&tile, layout, request, part.seq_kv, 0);
        if !sizes.counts(&tile).iter().all(|&(_, count)| is_u32(count)) {
            break;
        }
        let time = work.time(shares, multiprocessors) as f64;
        if time < best.0 {
            best = (time, shares);
        }
    }
    best.1
}

/// Returns two mainloops, if they should be faster than the fused pass. That is so if the fused pass would wait for a long tile, whose steps cubes can
/// share in the mainloops. If all tiles are alike, the mainloops take `gain` times the time of the fused pass.
pub(super) fn faster_mainloops(
    part: &PartRequest,
    fused: &BackwardTile,
    gain: f64,
    mainloops: impl FnOnce() -> [MainloopPlan; 2],
) -> Option<[MainloopPlan; 2]> {
    /// Least factor of speed for which mainloops replace the fused pass.
    const FASTER: f64 = 1.15;
    /// Fraction of the products that each mainloop computes.
    const PRODUCTS: [f64; 2] = [3.0 / 7.0, 4.0 / 7.0];
    let multiprocessors = multiprocessors(part.properties);
    let turns = turns(part, Mainloop::Columns);
    // Without sharing, two mainloops wait for long tiles too.
    if part.limit == TierLimit::HopperAlone
        || !may_be_notable(part, fused.tiling, turns, multiprocessors)
    {
        return None;
    }
    let work = Work::new(part, fused);
    let time = work.time(fused.shares, multiprocessors) as f64;
    let mean = work.all_steps() as f64 / multiprocessors as f64;
    if time < FASTER * gain * mean || !work.has_long_tiles() {
        return None;
    }
    let mainloops = mainloops();
    let at_a_time = |tiling: Tiling, places: usize| (tiling.rows * tiling.cols * places) as f64;
    let of_fused = at_a_time(fused.tiling, multiprocessors);
    let of_mainloop = |MainloopPlan { tile, long }: MainloopPlan| {
        let places = places(part, &tile);
        let steps = Heads::new(part, &tile).time(long, places);
        steps as f64 * at_a_time(tile.tiling, places) / of_fused
    };
    let times = mainloops.map(of_mainloop).into_iter().zip(PRODUCTS);
    let of_mainloops: f64 = times.map(|(time, products)| time * products).sum();
    (time > FASTER * gain * of_mainloops).then_some(mainloops)
}

/// Whether a tile of `turns` query heads may be a notable part of a mainloop. An estimate without counting steps: the longest tile attends to everything,
/// and the number of steps is at least what the blocks alone would take.
fn may_be_notable(part: &PartRequest, tiling: Tiling, turns: usize, places: usize) -> bool {
    let layout = part.layout;
    let [_, others] = tiling.mainloop.lengths(layout);
    let batches = layout.batch().map_or(part.request.batch, |_| 1);
    let pairs = layout.blocks() * batches * layout.block_size().pow(2);
    turns * others.div_ceil(tiling.cols) * NOTABLE * places >= pairs / (tiling.rows * tiling.cols)
}

/// Work of the fused pass.
struct Work<'a> {
    part: &'a PartRequest<'a>,
    /// Steps of the tiles of each pattern, ordered by decreasing steps over all patterns.
    steps: Vec<Vec<usize>>,
}

impl<'a> Work<'a> {
    fn new(part: &'a PartRequest<'a>, tile: &BackwardTile) -> Self {
        let steps = tile_steps(part.layout, tile.tiling);
        let tiles = steps.first().map_or(0, Vec::len);
        let mut ranked: Vec<usize> = (0..tiles).collect();
        ranked.sort_by_key(|&tile| Reverse(steps.iter().map(|steps| steps[tile]).sum::<usize>()));
        let in_order = |steps: Vec<usize>| ranked.iter().map(|&tile| steps[tile]).collect();
        Self {
            part,
            steps: steps.into_iter().map(in_order).collect(),
        }
    }

    /// Whether a tile has several times the mean number of steps.
    fn has_long_tiles(&self) -> bool {
        /// Under a causal mask, the first tile has twice the mean number of steps, and is not long.
        const SEVERAL: usize = 4;
        let is_long = |steps: &Vec<usize>| {
            let all: usize = steps.iter().sum();
            let longest = steps.iter().copied().max().unwrap_or(0);
            longest * steps.len() > SEVERAL * all
        };
        self.steps.iter().any(is_long)
    }

    /// Returns the number of steps of all cubes.
    fn all_steps(&self) -> usize {
        let layout = self.part.layout;
        let sums: Vec<usize> = self.steps.iter().map(|steps| steps.iter().sum()).collect();
        let of_entry = |entry| -> usize {
            let heads = 0..layout.heads();
            heads.map(|head| sums[layout.pattern_of(entry, head)]).sum()
        };
        (0..self.part.request.batch).map(of_entry).sum()
    }

    /// Returns the time until the last cube ends, in steps, with `shares` cubes per tile and one cube at a time on each multiprocessor. Cubes start in
    /// launch order.
    fn time(&self, shares: usize, multiprocessors: usize) -> usize {
        let (layout, request) = (self.part.layout, self.part.request);
        let (batch, kv_heads) = (request.batch, request.kv_heads);
        let own = match shares {
            1 => CUBE,
            _ => SHARING_CUBE,
        };
        let spread = match shares {
            1 => SPREAD,
            _ => SPREAD_SHARES,
        } as usize;
        let heads = layout.heads() / kv_heads / shares;
        let mut schedule = Schedule::new(multiprocessors);
        let mut longest = 0;
        let turns: Vec<usize> = (0..batch * kv_heads * shares).collect();
        for turns in turns.chunks(spread) {
            for rank in 0..self.steps.first().map_or(0, Vec::len) {
                for &turn in turns {
                    let entry = turn / (kv_heads * shares);
                    let first = turn % (kv_heads * shares) * heads;
                    let steps: usize = (first..first + heads)
                        .map(|head| self.steps[layout.pattern_of(entry, head)][rank])
                        .sum();
                    longest = longest.max(steps);
                    schedule.add(own + steps);
                }
            }
        }
        let last = schedule.last + longest / SLOWER;
        match shares {
            1 => last,
            _ => last + LAUNCH,
        }
    }
}

/// Simulates cubes of which a fixed number run at a time, started in the order in which they are added.
struct Schedule {
    /// Times at which the places become free.
    free: BinaryHeap<Reverse<usize>>,
    /// Time at which the last cube ends.
    last: usize,
}

impl Schedule {
    fn new(places: usize) -> Self {
        Self {
            free: (0..places.max(1)).map(|_| Reverse(0)).collect(),
            last: 0,
        }
    }

    fn add(&mut self, time: usize) {
        let mut first = self.free.peek_mut().expect("a device has a multiprocessor");
        first.0 += time;
        self.last = self.last.max(first.0);
    }
}

/// Sums that a unit of the later launch reads in sequence in the time of a step. A guess.
const READ_IN_A_STEP: usize = 8;
/// Largest number of elements of the sums of shared tiles: 256 MiB.
const MOST_SUMS: usize = 1 << 26;

/// Returns the tiles of a mainloop whose steps cubes share, and how many cubes.
pub(super) fn long_tiles(part: &PartRequest, tile: &MainloopTile) -> LongTiles {
    // Steps of layouts that a device chooses are not known here.
    if part.limit == TierLimit::HopperAlone || part.layout.device_choice().is_some() {
        return LongTiles::NONE;
    }
    let places = places(part, tile);
    if !may_be_notable(part, tile.tiling, turns(part, tile.mainloop), places) {
        return LongTiles::NONE;
    }
    let heads = Heads::new(part, tile);
    let longest = heads.longest(0);
    if longest * NOTABLE * places < heads.all_steps() {
        return LongTiles::NONE;
    }
    let alone = heads.time(LongTiles::NONE, places) as f64;
    let mut best = (alone / WORTHWHILE, LongTiles::NONE);
    let counts = (1..).map(|power| 1 << power);
    for cubes in counts.take_while(|cubes| longest / cubes > SHARING_CUBE) {
        let is_long = |rank: &usize| heads.longest(*rank) > longest / cubes;
        let tiles = (0..heads.tiles).take_while(is_long).count();
        let long = LongTiles { tiles, cubes };
        if long.elements(tile, heads.of_launch.len()) > MOST_SUMS {
            break;
        }
        let time = heads.time(long, places) as f64;
        if time < best.0 {
            best = (time, long);
        }
    }
    best.1
}

/// Returns the query heads per tile.
fn turns(part: &PartRequest, mainloop: Mainloop) -> usize {
    match mainloop {
        Mainloop::Rows => 1,
        Mainloop::Columns => part.layout.heads() / part.request.kv_heads,
    }
}

/// Returns the cubes of a mainloop that a device runs at a time.
fn places(part: &PartRequest, tile: &MainloopTile) -> usize {
    /// Units of a multiprocessor with the most registers per unit.
    const UNITS: usize = 256;
    /// Shared memory that the system reserves per cube.
    const SYSTEM: usize = 1024;
    let hardware = &part.properties.hardware;
    let of_memory = (hardware.max_shared_memory_size + SYSTEM) / (tile.shared_bytes() + SYSTEM);
    multiprocessors(part.properties) * of_memory.min(UNITS / tile.units()).max(1)
}

/// The heads of a mainloop's launch.
struct Heads {
    /// Tiles per head.
    tiles: usize,
    /// Steps of tiles in launch order, for each distinct list of patterns of a head's query heads.
    steps: Vec<Vec<usize>>,
    /// Index into `steps` of each head, over all batch entries.
    of_launch: Vec<usize>,
}

impl Heads {
    fn new(part: &PartRequest, tile: &MainloopTile) -> Self {
        let layout = part.layout;
        let turns = turns(part, tile.mainloop);
        let [length, _] = tile.mainloop.lengths(layout);
        let tiles = length.div_ceil(tile.rows());
        let of_patterns = tile_steps(layout, tile.tiling);
        let mut known = BTreeMap::new();
        let mut heads = Self {
            tiles,
            steps: Vec::new(),
            of_launch: Vec::new(),
        };
        for entry in 0..part.request.batch {
            for first in (0..layout.heads()).step_by(turns) {
                let patterns: Vec<usize> = (first..first + turns)
                    .map(|head| layout.pattern_of(entry, head))
                    .collect();
                let steps = &mut heads.steps;
                let index = *known.entry(patterns).or_insert_with_key(|patterns| {
                    // Tiles are ordered by the pattern of the first query head.
                    let first = &of_patterns[patterns[0]];
                    let mut ranked: Vec<usize> = (0..tiles).collect();
                    ranked.sort_by_key(|&tile| Reverse(first[tile]));
                    let of_tile = |tile| patterns.iter().map(|&p| of_patterns[p][tile]).sum();
                    steps.push(ranked.into_iter().map(of_tile).collect());
                    steps.len() - 1
                });
                heads.of_launch.push(index);
            }
        }
        heads
    }

    /// Returns the most steps that the tile of a rank has in any head.
    fn longest(&self, rank: usize) -> usize {
        let of_rank = self.steps.iter().filter_map(|steps| steps.get(rank));
        of_rank.copied().max().unwrap_or(0)
    }

    fn all_steps(&self) -> usize {
        let sums: Vec<usize> = self.steps.iter().map(|steps| steps.iter().sum()).collect();
        self.of_launch.iter().map(|&index| sums[index]).sum()
    }

    /// Returns the time until the last cube ends, in steps, with `places` cubes at a time.
    fn time(&self, long: LongTiles, places: usize) -> usize {
        let mut schedule = Schedule::new(places);
        for &index in &self.of_launch {
            let (shared, alone) = self.steps[index].split_at(long.tiles);
            for &steps in shared {
                for index in 0..long.cubes as u32 {
                    let stretch = Stretch::of(steps as u32, index, long.cubes as u32);
                    schedule.add(SHARING_CUBE + stretch.steps as usize);
                }
            }
            for &steps in alone {
                schedule.add(CUBE + steps);
            }
        }
        match long.any() {
            true => schedule.last + LAUNCH + long.cubes / READ_IN_A_STEP,
            false => schedule.last,
        }
    }
}
