//! Long tiles of the two mainloops, whose steps cubes share.
//!
//! Where all queries see a few keys, as attention sinks or the first block of native sparse attention, the tile of these keys has all queries of
//! all heads that share them while the others have a few: one cube is the time of the mainloop. So several cubes have a stretch of the steps of
//! such a tile each ([`balance`](super::balance) says of which tiles, and how many), write their sums in f32, and [`fold_tiles`] adds them up in order.
//!
//! ```text
//! cubes of a head    tile 0, by falling steps      tile 1                    …    then one for each other tile
//!                    stretch 0 | 1 | … | cubes−1   stretch 0 | … | cubes−1
//! stretch i          of the steps of all query heads, one head after the other: steps / cubes of them, the first ones one more
//! sums               [batch, heads, tiles, cubes, dK | dV, rows, width] of a loop over columns, of one over rows dQ alone
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

/// Which tiles of a mainloop cubes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongTiles {
    /// So many of each head, those with most steps.
    pub tiles: usize,
    /// Cubes to each of them.
    pub cubes: usize,
}

impl LongTiles {
    /// None.
    pub const NONE: Self = Self { tiles: 0, cubes: 1 };

    /// Whether there are any.
    pub fn any(&self) -> bool {
        self.tiles > 0
    }

    /// Cubes of a head with so many tiles.
    pub fn cubes_of(&self, tiles: usize) -> usize {
        tiles + self.tiles * (self.cubes - 1)
    }

    /// Elements of the sums of so many heads.
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

/// A mainloop: its tiles, and those of them that cubes share.
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

/// Gradients that a mainloop makes of its tiles' rows.
fn gradients(tile: &MainloopTile) -> usize {
    1 + usize::from(tile.columns())
}

/// [`LongTiles`] as a mainloop gets them.
#[derive(CubeType, CubeLaunch)]
pub struct TileShares {
    /// The sums, as above.
    pub sums: Box<[f32]>,
    /// Tiles of a head that are shared,
    pub tiles: u32,
    /// and cubes to each.
    pub cubes: u32,
}

/// What a cube has.
#[derive(CubeType, Clone, Copy)]
pub struct Share {
    /// Its tile, by falling steps.
    pub rank: u32,
    /// Which stretch of the tile's steps,
    pub index: u32,
    /// of how many.
    pub cubes: u32,
}

#[cube]
impl Share {
    /// That of the cube at a place of its head's, where `cubes` share each of so many tiles.
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

/// The cube's tile, and its part of it.
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

/// A stretch of the steps of a tile, of all its query heads one after the other.
#[derive(CubeType, Clone, Copy)]
pub struct Stretch {
    /// Steps before it,
    pub first: u32,
    /// and of it.
    pub steps: u32,
}

#[cube]
impl Stretch {
    /// The `index`-th of `cubes` that make up `all` steps.
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

/// The cube's stretch of the steps of a tile of these heads.
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

/// The steps of a query head that are of a stretch.
#[derive(CubeType, Clone, Copy)]
pub struct TurnSteps {
    /// Those of other cubes, before these.
    pub first: u32,
    pub end: u32,
}

/// Those of a head with so many steps: `before` steps from its first one on come before the stretch, of which so many are done.
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
    /// The head, of all batch entries.
    pub outer: u32,
    /// The upper row of the tile.
    pub row: u32,
    pub rows: StoredRows,
}

/// Stores the unit's two rows of the `which`-th gradient, or of a cube's sums of it. The head's first row is row `outer · len` behind vector `start`.
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
        // Found again rather than kept: registers are short.
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
                // Rows of a tile are as they are.
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

/// The numbers of [`fold_tiles`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct FoldLengths {
    /// Tiles of a head that are shared,
    pub tiles: u32,
    /// and cubes to each.
    pub cubes: u32,
    /// Heads that the mainloop was launched for,
    pub heads: u32,
    /// query heads to one of them,
    pub turns: u32,
    /// and batch entries.
    pub batches: u32,
    /// Positions.
    pub len: u32,
    /// Vectors before dV.
    pub second: u32,
}

/// Gradients of the rows of shared tiles from the sums of their cubes: a unit makes eight columns of a row. With `carry` they are added to what is
/// there.
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

    /// Cubes of a head are those of its tiles, each once, the shared ones first.
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

    /// The stretches of all cubes are the steps of all heads, each once and in order, and no cube has two more than another.
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
