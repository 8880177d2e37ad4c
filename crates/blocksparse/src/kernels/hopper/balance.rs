//! How many cubes share the queries of a tile of keys, so that all multiprocessors of a device have work until the end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::fused::{SPREAD, SPREAD_SHARES, Sizes};
use super::tiles::BackwardTile;
use crate::kernels::call::{PartRequest, Request, TierLimit};
use crate::kernels::tensor::is_u32;
use crate::plan::tile_steps;

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
        let mut free: BinaryHeap<Reverse<usize>> =
            (0..multiprocessors).map(|_| Reverse(0)).collect();
        let (mut last, mut longest) = (0, 0);
        let turns: Vec<usize> = (0..batch * kv_heads * shares).collect();
        for turns in turns.chunks(spread) {
            for rank in 0..self.steps.first().map_or(0, Vec::len) {
                for &turn in turns {
                    let entry = turn / (kv_heads * shares);
                    let first = turn % (kv_heads * shares) * heads;
                    let steps: usize = (first..first + heads)
                        .map(|head| self.steps[layout.pattern_of(entry, head)][rank])
                        .sum();
                    let Reverse(begin) = free.pop().expect("a device has a multiprocessor");
                    let end = begin + own + steps;
                    longest = longest.max(steps);
                    free.push(Reverse(end));
                    last = last.max(end);
                }
            }
        }
        let last = last + longest / SLOWER;
        match shares {
            1 => last,
            _ => last + LAUNCH,
        }
    }
}
