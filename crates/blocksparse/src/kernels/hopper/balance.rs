//! How many cubes share the queries of a tile of keys, or the steps of a long tile, so that all multiprocessors of a device have work until the end.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::fused::{SPREAD, SPREAD_SHARES, Sizes};
use super::long_tiles::{LongTiles, Stretch};
use super::tiles::{BackwardTile, WalkTile};
use crate::kernels::call::{PartRequest, Request, TierLimit};
use crate::kernels::tensor::is_u32;
use crate::plan::{Walk, tile_steps};

/// What a cube takes before its first and after its last step, in steps.
const CUBE: usize = 1;
/// What one takes whose sums go through memory in f32, written by it and read by the launch behind.
const SHARING_CUBE: usize = 5;
/// What that launch takes.
const LAUNCH: usize = 2;
/// Cubes are not equally fast: they wait for each other at the sums of dQ. The longest may take this part of its time longer, in which
/// nobody helps.
const SLOWER: usize = 16;
/// What sharing has to save.
const WORTHWHILE: f64 = 1.05;
/// Where there are more tiles than this for each multiprocessor, as a rule no tile is a notable part of the pass, and the sums of all of
/// them would take much memory.
const MANY: usize = 8;

/// The cubes that share each tile: a divisor of the query heads to a head of keys, 1 if a cube has them all.
pub(super) fn shares(part: &PartRequest, tile: &BackwardTile) -> usize {
    let &PartRequest {
        layout, request, ..
    } = part;
    let heads_per_kv = layout.heads() / request.kv_heads;
    let multiprocessors = part.properties.hardware.num_streaming_multiprocessors;
    let multiprocessors = multiprocessors.unwrap_or(1) as usize;
    let heads_of_keys = request.batch * request.kv_heads;
    let tiles = layout.seq_kv().div_ceil(tile.rows());
    // A cube that computes tile after tile has none of its own.
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

/// What there is to do.
struct Work<'a> {
    part: &'a PartRequest<'a>,
    /// Steps of the tiles of each pattern, those with most steps in all patterns first.
    steps: Vec<Vec<usize>>,
}

impl<'a> Work<'a> {
    fn new(part: &'a PartRequest<'a>, tile: &BackwardTile) -> Self {
        let steps = tile_steps(part.layout, tile.tiling());
        let tiles = steps.first().map_or(0, Vec::len);
        let mut ranked: Vec<usize> = (0..tiles).collect();
        ranked.sort_by_key(|&tile| Reverse(steps.iter().map(|steps| steps[tile]).sum::<usize>()));
        let in_order = |steps: Vec<usize>| ranked.iter().map(|&tile| steps[tile]).collect();
        Self {
            part,
            steps: steps.into_iter().map(in_order).collect(),
        }
    }

    /// The time until the last cube ends, in steps, with so many cubes to each tile and one cube at a time on each multiprocessor. Cubes
    /// begin in the order of the launch.
    fn time(&self, shares: usize, multiprocessors: usize) -> usize {
        let &PartRequest {
            layout, request, ..
        } = self.part;
        let &Request {
            batch, kv_heads, ..
        } = request;
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

/// Cubes that run so many at a time, begun in the order in which they are added.
struct Schedule {
    /// When each place is free.
    free: BinaryHeap<Reverse<usize>>,
    /// When the last cube ends.
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

/// The longest tile must be this part of the time of a walk at least to be shared.
const NOTABLE: usize = 20;
/// Sums that a unit of the launch behind such a walk reads one after the other in the time of a step. A guess.
const READ_IN_A_STEP: usize = 8;
/// Numbers of the sums of shared tiles, at most: 256 MiB.
const MOST_SUMS: usize = 1 << 26;

/// The tiles of a walk whose steps cubes share, and how many cubes.
pub(super) fn long_tiles(part: &PartRequest, tile: &WalkTile, walk: Walk) -> LongTiles {
    let &PartRequest {
        layout, request, ..
    } = part;
    // Steps of layouts that a device chooses are not known here.
    if part.limit == TierLimit::HopperAlone || layout.device_choice().is_some() {
        return LongTiles::NONE;
    }
    let turns = match walk {
        Walk::Rows => 1,
        Walk::Columns => layout.heads() / request.kv_heads,
    };
    let places = places(part, tile);
    let b = layout.block_size();
    let (length, others) = match walk {
        Walk::Rows => (layout.seq_q(), layout.seq_kv()),
        Walk::Columns => (layout.seq_kv(), layout.seq_q()),
    };
    // Before steps are counted: there are as many as computing nothing but the blocks would take at least.
    let batches = layout.batch().map_or(request.batch, |_| 1);
    let least = layout.blocks() * batches * b * b / (tile.rows() * tile.cols);
    if turns * others.div_ceil(tile.cols) * NOTABLE * places < least {
        return LongTiles::NONE;
    }
    let heads = Heads::new(part, tile, walk, turns, length.div_ceil(tile.rows()));
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
        if long.numbers(tile, walk, heads.of_launch.len()) > MOST_SUMS {
            break;
        }
        let time = heads.time(long, places) as f64;
        if time < best.0 {
            best = (time, long);
        }
    }
    best.1
}

/// Cubes of a walk that a device runs at a time.
fn places(part: &PartRequest, tile: &WalkTile) -> usize {
    /// Units with as many registers as a unit can have.
    const UNITS: usize = 256;
    /// Shared memory that the system takes of each cube.
    const SYSTEM: usize = 1024;
    let hardware = &part.properties.hardware;
    let multiprocessors = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    let of_memory = (hardware.max_shared_memory_size + SYSTEM) / (tile.shared_bytes() + SYSTEM);
    multiprocessors * of_memory.min(UNITS / tile.units()).max(1)
}

/// The heads that a walk is launched for.
struct Heads {
    /// Tiles of a head.
    tiles: usize,
    /// Steps of tiles, in the order of the launch, for each list of patterns that a head's query heads have.
    steps: Vec<Vec<usize>>,
    /// Which of these each has, of all batch entries.
    of_launch: Vec<usize>,
}

impl Heads {
    fn new(part: &PartRequest, tile: &WalkTile, walk: Walk, turns: usize, tiles: usize) -> Self {
        let layout = part.layout;
        let of_patterns = tile_steps(layout, tile.tiling(walk));
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
                    // The tiles of the first one's pattern are in order.
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

    /// The most steps that the tile of a rank has in any head.
    fn longest(&self, rank: usize) -> usize {
        let of_rank = self.steps.iter().filter_map(|steps| steps.get(rank));
        of_rank.copied().max().unwrap_or(0)
    }

    fn all_steps(&self) -> usize {
        let sums: Vec<usize> = self.steps.iter().map(|steps| steps.iter().sum()).collect();
        self.of_launch.iter().map(|&index| sums[index]).sum()
    }

    /// The time until the last cube ends, in steps, with so many cubes at a time.
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
