//! Long tiles of the two mainloops, whose steps several cubes share.
//!
//! If all queries attend to a few keys, such as attention sinks or the first block of native sparse attention, the tile of these keys has all queries of
//! all heads that share them, while other tiles have a few. Then a single cube determines the time of the mainloop. So several cubes each take a stretch of
//! the steps of such a tile ([`balance`](super::balance) chooses the tiles and the number of cubes) and write their sums in f32, and [`fold_tiles`] adds
//! them up in order.
//!
//! ```text
//! cubes of a head    longest tile                  second longest            …    then one cube per other tile
//!                    stretch 0 | 1 | … | cubes−1   stretch 0 | … | cubes−1
//! stretch i          steps / cubes consecutive steps (one more in the first ones) of the list of all query heads' steps, head after head
//! sums               [batch, heads, tiles, cubes, dK | dV, rows, width] in a loop over columns, dQ alone in a loop over rows
//! ```

use std::fmt;

use cubecl::prelude::*;

use super::base::Base;
use super::gradient::{StoredRows, row_position, store_rows};
use super::shares::{fold_eight, store_sums};
use super::tiles::MainloopTile;
use crate::arch::sm90::*;
use crate::shared::addressing::{Four, Listing, PlanParts, PlanWords, TileHeads};
use crate::shared::own_rows::{own_place, own_rows};

/// Tiles of a mainloop that several cubes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongTiles {
    /// Number of shared tiles per head, those with most steps.
    pub tiles: usize,
    /// Cubes per shared tile.
    pub cubes: usize,
}

impl LongTiles {
    /// No shared tiles.
    pub const NONE: Self = Self { tiles: 0, cubes: 1 };

    /// Whether any tiles are shared.
    pub fn any(&self) -> bool {
        self.tiles > 0
    }

    /// Returns the number of cubes of a head with `tiles` tiles.
    pub fn cubes_of(&self, tiles: usize) -> usize {
        tiles + self.tiles * (self.cubes - 1)
    }

    /// Returns the number of elements of the sums of `heads` heads.
    pub(super) fn elements(&self, tile: &MainloopTile, heads: usize) -> usize {
        heads * self.tiles * self.cubes * gradients(tile) * tile.rows() * tile.dim
    }
}

impl fmt::Display for LongTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tiles, cubes } = self;
        match tiles {
            0 => Ok(()),
            1 => write!(
                f,
                ", the steps of the longest tile of a head shared by {cubes} cubes"
            ),
            _ => write!(
                f,
                ", the steps of each of the {tiles} longest tiles of a head shared by {cubes} cubes"
            ),
        }
    }
}

/// A mainloop: its tile, and which tiles several cubes share.
#[derive(Clone, Copy, Debug)]
pub struct MainloopPlan {
    pub tile: MainloopTile,
    pub long: LongTiles,
}

impl fmt::Display for MainloopPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.tile, self.long)
    }
}

/// Returns the number of gradients that a mainloop computes for its tiles' rows.
fn gradients(tile: &MainloopTile) -> usize {
    1 + usize::from(tile.columns())
}

/// [`LongTiles`] as kernel arguments.
#[derive(CubeType, CubeLaunch)]
pub struct TileShares {
    /// The sums, in the layout above.
    pub sums: Box<[f32]>,
    /// Shared tiles per head.
    pub tiles: u32,
    /// Cubes per shared tile.
    pub cubes: u32,
}

/// A cube's part of the work.
#[derive(CubeType, Clone, Copy)]
pub struct Share {
    /// Rank of its tile in the order of decreasing steps.
    pub rank: u32,
    /// Index of its stretch of the tile's steps.
    pub index: u32,
    /// Number of stretches.
    pub cubes: u32,
}

#[cube]
impl Share {
    /// Returns the share of the cube at index `place` of its head, where each of the first `tiles` tiles has `cubes` cubes.
    pub fn at(place: u32, tiles: u32, cubes: u32) -> Share {
        let shared = tiles * cubes;
        let mut share = Share {
            rank: place / cubes,
            index: place % cubes,
            cubes,
        };
        if place >= shared {
            share.rank = place - shared + tiles;
            share.index = 0u32;
            share.cubes = 1u32;
        }
        share
    }
}

/// Returns the cube's tile, and its part of it.
#[cube]
pub fn share_of_cube(shares: &ComptimeOption<TileShares>, #[comptime] t: MainloopTile) -> Share {
    let mut rank = CUBE_POS_X;
    let mut index = 0u32;
    let mut cubes = 1u32;
    if comptime!(t.long_tiles) {
        let shares = shares.as_ref().unwrap();
        let share = Share::at(CUBE_POS_X, shares.tiles, shares.cubes);
        rank = share.rank;
        index = share.index;
        cubes = share.cubes;
    }
    Share { rank, index, cubes }
}

/// A stretch of a tile's steps, counted through all its query heads in order.
#[derive(CubeType, Clone, Copy)]
pub struct Stretch {
    /// Number of steps before it.
    pub first: u32,
    /// Number of its steps.
    pub steps: u32,
}

#[cube]
impl Stretch {
    /// Returns stretch `index` of `cubes` that divide `all` steps.
    pub fn of(all: u32, index: u32, cubes: u32) -> Stretch {
        let (least, more) = (all / cubes, all % cubes);
        let mut steps = least;
        if index < more {
            steps += 1u32;
        }
        Stretch {
            first: least * index + index.min(more),
            steps,
        }
    }
}

/// Returns the cube's stretch of the steps of a tile of these heads.
#[cube]
pub fn stretch_of_cube(
    plan: &[u32],
    parts: &PlanParts,
    heads_at: usize,
    heads: &TileHeads,
    tile: u32,
    share: &Share,
    #[comptime] t: MainloopTile,
) -> Stretch {
    let mut first = 0u32;
    let mut steps = comptime!(u32::MAX / 2).runtime();
    if comptime!(t.long_tiles) {
        if share.cubes > 1 {
            let mut all = 0u32;
            for turn in 0..heads.turns {
                let first_record = plan[heads_at + (heads.first + turn) as usize];
                all += plan[parts.tiles + (first_record + tile) as usize * 3 + 1];
            }
            let stretch = Stretch::of(all, share.index, share.cubes);
            first = stretch.first;
            steps = stretch.steps;
        }
        first = uniform(first);
        steps = uniform(steps);
    }
    Stretch { first, steps }
}

/// The steps of a query head that belong to a stretch.
#[derive(CubeType, Clone, Copy)]
pub struct TurnSteps {
    /// Number of steps before these, which belong to other cubes.
    pub first: u32,
    pub end: u32,
}

/// Returns the stretch's steps in a head with `steps` steps. From the head's first step on, `before` steps come before the stretch, of which `done` steps
/// are completed.
#[cube]
pub fn steps_of_turn(
    before: u32,
    done: u32,
    steps: u32,
    stretch: &Stretch,
    #[comptime] t: MainloopTile,
) -> TurnSteps {
    let mut first = 0u32;
    let mut end = steps;
    if comptime!(t.long_tiles) {
        first = before.min(steps);
        end = steps.min(first + stretch.steps - done);
    }
    TurnSteps { first, end }
}

/// The rows of a mainloop's tile that a unit stores.
#[derive(CubeType, Clone, Copy)]
pub struct MainloopRows {
    /// Index of the head over all batch entries.
    pub outer: u32,
    /// Upper row in the tile.
    pub row: u32,
    pub rows: StoredRows,
}

/// Stores the unit's two rows of gradient `which`, or a cube's sums of it. The gradient begins at vector `start`, and the head at row `outer · len`.
#[cube]
pub fn store_rows_or_sums<O: Size>(
    out: &mut [Vector<u32, Four>],
    acc: &Vector<f32, O>,
    start: u32,
    which: u32,
    own: &MainloopRows,
    factor: f32,
    shares: &ComptimeOption<TileShares>,
    #[comptime] shape: Base,
    #[comptime] t: MainloopTile,
) {
    let first = own.outer * own.rows.len;
    if comptime!(t.long_tiles) {
        // Recomputed, because registers are short.
        let share = share_of_cube(shares, t);
        if share.cubes > 1 {
            let shares = shares.as_ref().unwrap();
            let of_cube = (own.outer * shares.tiles + share.rank) * shares.cubes + share.index;
            let rows = comptime!(t.rows() as u32);
            let sums = global_address::<f32>(&shares.sums[..]);
            let its_first = (of_cube * comptime!(gradients(&t) as u32) + which) * rows;
            let its = StoredRows {
                place: own.row,
                place8: own.row + 8,
                // Rows of the sums are in the order of the tile.
                listing: Listing {
                    stride: 1usize.runtime(),
                    class_len: 1usize.runtime(),
                },
                len: rows.runtime(),
                lane: own.rows.lane,
            };
            let its_shape = comptime!(Base {
                residue: false,
                ..t.base
            });
            store_sums::<O>(sums, acc, its_first, &its, factor, its_shape);
        } else {
            store_rows::<O>(out, acc, start, first, &own.rows, factor, shape);
        }
    } else {
        store_rows::<O>(out, acc, start, first, &own.rows, factor, shape);
    }
}

/// Lengths of [`fold_tiles`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct FoldLengths {
    /// Shared tiles per head.
    pub tiles: u32,
    /// Cubes per shared tile.
    pub cubes: u32,
    /// Number of heads of the mainloop's launch.
    pub heads: u32,
    /// Query heads per head of the launch.
    pub turns: u32,
    /// Number of batch entries.
    pub batches: u32,
    /// Number of positions.
    pub len: u32,
    /// Vector at which dV begins.
    pub second: u32,
}

/// Computes gradients of the rows of shared tiles from the sums of their cubes. A unit computes eight columns of a row. With `carry` they are added to the
/// present values.
#[cube(launch_unchecked)]
pub fn fold_tiles(
    sums: &[Vector<f32, Four>],
    out: &mut [Vector<u32, Four>],
    parts: PlanParts,
    plan: PlanWords,
    lengths: FoldLengths,
    #[comptime] t: MainloopTile,
) {
    let eights = comptime!(t.dim as u32 / 8);
    let rows = comptime!(t.rows() as u32);
    let gradients = comptime!(gradients(&t) as u32);
    let index = ABSOLUTE_POS as u32;
    let eight = index % eights;
    let row = index / eights % rows;
    let which = index / (eights * rows) % gradients;
    let of_tile = index / (eights * rows * gradients);
    let outer = of_tile / lengths.tiles;
    let batch = outer / lengths.heads;
    if batch < lengths.batches {
        let first_head = outer % lengths.heads * lengths.turns;
        let heads_at = parts.heads + batch as usize * parts.batch;
        let record0 = plan.words[heads_at + first_head as usize] as usize;
        let rank = (of_tile % lengths.tiles) as usize;
        let tile = plan.words[parts.order + (record0 + rank) * 4];
        let rows_at = own_rows(&parts, record0, tile, comptime!(t.own_shape()));
        let place = own_place(&plan.words[..], rows_at, row, comptime!(t.own_shape()));
        let found = row_position(place, &plan.listing, lengths.len, t.residue);
        let mut width = eights.runtime();
        let mut start = 0u32;
        if which == 1 {
            width = comptime!(t.value_dim as u32 / 8);
            start = lengths.second;
        }
        if found.exists && eight < width {
            let of_cube = of_tile * lengths.cubes * gradients + which;
            let at = ((of_cube * rows + row) * eights + eight) as usize * 2;
            let between = (gradients * rows * eights) as usize * 2;
            let target = start + (outer * lengths.len + found.position) * width + eight;
            let shares = lengths.cubes as usize;
            fold_eight(sums, out, at, between, shares, target as usize, t.base);
        }
    }
}

#[cfg(test)]
mod tests {
    use cubecl::ir::{ElemType, FloatKind};

    use super::*;
    use crate::call::{PartRequest, Request};
    use crate::described::Fake;
    use crate::tuning::TierLimit;
    use blocksparse::Pattern;
    use blocksparse::plan::Mainloop;

    /// The cubes of a head cover its tiles, shared ones first.
    #[test]
    fn cubes_have_all_tiles() {
        for (all, long) in [
            (5, LongTiles { tiles: 1, cubes: 4 }),
            (3, LongTiles { tiles: 3, cubes: 2 }),
        ] {
            let (tiles, cubes) = (long.tiles as u32, long.cubes as u32);
            let mut found = (0..long.cubes_of(all) as u32).map(|place| {
                let Share {
                    rank,
                    index,
                    cubes: of,
                } = Share::at(place, tiles, cubes);
                [rank, index, of]
            });
            for rank in 0..all as u32 {
                let of = if rank < tiles { cubes } else { 1 };
                for index in 0..of {
                    assert_eq!(found.next(), Some([rank, index, of]));
                }
            }
            assert_eq!(found.next(), None);
        }
    }

    /// The stretches of all cubes cover the steps of all heads once and in order, and their lengths differ by at most one.
    #[test]
    fn stretches_make_up_all_steps() {
        let layout = Pattern::causal().layout(1, 128, 64).unwrap();
        let device = Fake::sm90();
        let request = Request::new([1, 1], [128, 128], ElemType::Float(FloatKind::BF16));
        let part = PartRequest {
            layout: &layout,
            request: &request,
            seq_kv: 128,
            residue: None,
            carry: false,
            limit: TierLimit::None,
            properties: &device.properties,
        };
        let tile = MainloopTile {
            base: Base::new(&part, (Half::Bf16, 128), Mainloop::Columns, [1, 64, 2, 1]),
            value_dim: 128,
            shared: false,
            bias_sums: false,
            long_tiles: true,
        };
        for heads in [
            vec![7],
            vec![3, 0, 5, 1],
            vec![0, 0, 4],
            vec![64; 16],
            vec![0],
        ] {
            let all: u32 = heads.iter().sum();
            for cubes in 2..=19 {
                let mut visited = Vec::new();
                for index in 0..cubes {
                    let stretch = Stretch::of(all, index, cubes);
                    assert!(stretch.steps.abs_diff(all / cubes) <= 1);
                    let (mut before, mut done) = (stretch.first, 0);
                    for (head, &steps) in heads.iter().enumerate() {
                        let own = steps_of_turn(before, done, steps, &stretch, tile);
                        before -= own.first;
                        visited.extend((own.first..own.end).map(|step| (head, step)));
                        done += own.end - own.first;
                    }
                    assert_eq!(done, stretch.steps);
                }
                let of_head = |(head, &steps)| (0..steps).map(move |step| (head, step));
                assert!(
                    visited
                        .into_iter()
                        .eq(heads.iter().enumerate().flat_map(of_head))
                );
            }
        }
    }
}
