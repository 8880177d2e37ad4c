//! A cube of a mainloop: its tile, its heads and steps, and their loads.

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::gradient::StoredRows;
use super::long_tiles::*;
use super::mainloop_loads::*;
use super::options::*;
use super::rows::RowPlaces;
use super::score_gradient::WeightShape;
use super::tiles::MainloopTile;
use crate::arch::sm90::*;
use crate::shared::addressing::{
    Listing, MainloopOperands, Schedule, TileHeads, batch_of, head_of, heads_of_tile,
};
use crate::shared::own_rows::own_rows;

impl MainloopTile {
    pub(super) fn weights(&self) -> WeightShape {
        WeightShape {
            base: self.base,
            stats_eight: 64,
            packed: self.shared,
        }
    }
}

/// State of a cube of a mainloop.
#[derive(CubeType)]
pub struct MainloopCube {
    /// Address of its shared memory.
    pub base: u32,
    /// The unit's warp and lane.
    pub warp: u32,
    pub lane: u32,
    pub batch: u32,
    /// Head of the launch.
    pub outer: u32,
    /// Heads of the tile.
    pub heads: TileHeads,
    /// Word at which the first tile records of heads are stored.
    pub heads_at: usize,
    pub tile: u32,
    /// Location of the tile's rows.
    pub rows_at: u32,
    pub stretch: Stretch,
    pub loads: Loads,
    /// The next step to load.
    pub cursor: Cursor,
}

/// Returns the cube's state, and starts the loads of its own rows and first steps. All units must call it together.
#[cube]
pub fn begin(
    operands: &MainloopOperands<TensorMap<u32, Tiled>>,
    stats: &TensorMap<f32, Tiled>,
    shares: &ComptimeOption<TileShares>,
    schedule: &Schedule,
    heads_per_kv: u32,
    #[comptime] t: MainloopTile,
) -> MainloopCube {
    let parts = &schedule.parts;
    let plan = &schedule.plan.words[..];
    let slice = &schedule.slice;
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let outer = head_of(slice) as u32;
    let batch = batch_of(slice) as u32;
    if UNIT_POS_X == 0 {
        barrier_init(base, 1u32);
        let full = base + comptime!(t.full());
        let empty = base + comptime!(t.empty());
        ring_init(full, empty, t.stages, comptime!(t.warps()));
    }
    sync_cube();

    let (all_heads, columns) = (slice.heads as u32, comptime!(t.columns()));
    let heads = heads_of_tile(outer, all_heads, heads_per_kv, columns, t.bias_sums);
    let heads_at = parts.heads + batch as usize * parts.batch;
    let record0 = plan[heads_at + heads.first as usize] as usize;
    let share = share_of_cube(shares, t);
    let ranked = parts.order + (record0 + share.rank as usize) * 4;
    let tile = plan[ranked];
    let rows_at = own_rows(parts, record0, tile, comptime!(t.own_shape()));
    let class_len = schedule.plan.listing.class_len as u32;
    let own = OwnRows {
        a1: tensor_map_address(&operands.a1),
        a2: tensor_map_address(&operands.a2),
        at: rows_at,
        class_len,
        head: heads.own,
        batch,
    };
    load_own_rows(plan, &own, base, t);

    let mut index = warp + lane * comptime!(t.warps());
    if comptime!(t.shared) {
        // The second warpgroup lags behind, so it loads.
        index = comptime!(u32::MAX).runtime();
        if warp / 4 == 1 {
            index = warp % 4 + lane * 4;
        }
    }
    let loads = Loads {
        b1: tensor_map_address(&operands.b1),
        b2: tensor_map_address(&operands.b2),
        stats: tensor_map_address(stats),
        base,
        class_len,
        batch,
        heads: heads.all,
        divisor: heads.divisor,
        index,
    };
    let stretch = stretch_of_cube(plan, parts, heads_at, &heads, tile, &share, t);
    let cursor = Cursor {
        head: RuntimeCell::<u32>::new(heads.first),
        end: heads.first + heads.turns,
        entry: RuntimeCell::<usize>::new(0usize),
        j: RuntimeCell::<u32>::new(stretch.first),
        steps: RuntimeCell::<u32>::new(0u32),
        loaded: RuntimeCell::<u32>::new(0u32),
        stretch: stretch.steps,
    };
    open(plan, parts, ranked + 1, &cursor);
    let cube = MainloopCube {
        base,
        warp,
        lane,
        batch,
        outer,
        heads,
        heads_at,
        tile,
        rows_at,
        stretch,
        loads,
        cursor,
    };
    #[unroll]
    for _ in 0..comptime!(t.stages - t.lag) {
        cube.load(schedule, t);
    }
    cube
}

/// The steps of a query head.
#[derive(CubeType, Clone, Copy)]
pub struct Turn {
    pub of_head: HeadOptions,
    /// Word of the head's first entry of the tile.
    pub entry: usize,
    /// Number of steps with masks. They come first.
    pub masked: u32,
    /// Steps of the cube.
    pub steps: TurnSteps,
}

#[cube]
impl MainloopCube {
    /// Loads the next step.
    pub fn load(&self, schedule: &Schedule, #[comptime] t: MainloopTile) {
        let (plan, parts) = (&schedule.plan.words[..], &schedule.parts);
        let (heads_at, tile) = (self.heads_at, self.tile);
        load_next(plan, parts, &self.loads, heads_at, tile, &self.cursor, t);
    }
}

/// Returns the steps of query head `turn`. From the head's first step on, `before` steps come before the cube's, of which `done` steps are completed.
#[cube]
pub fn turn_of(
    cube: &MainloopCube,
    schedule: &Schedule,
    args: &ComptimeOption<PairArgs>,
    turn: u32,
    before: u32,
    done: u32,
    #[comptime] t: MainloopTile,
) -> Turn {
    let plan = &schedule.plan.words[..];
    let head = cube.heads.first + turn;
    let first_record = plan[cube.heads_at + head as usize] as usize;
    let record = schedule.parts.tiles + (first_record + cube.tile as usize) * 3;
    let entry = schedule.parts.entries + plan[record] as usize * 2;
    let steps = uniform(plan[record + 1]);
    let masked = uniform(plan[record + 2]);
    let of_head = options_of(args, cube.batch, head, t.base);
    let steps = steps_of_turn(before, done, steps, &cube.stretch, t);
    Turn {
        of_head,
        entry,
        masked,
        steps,
    }
}

/// Returns the unit's rows of the tile, and where they are stored.
#[cube]
pub fn mainloop_rows(
    schedule: &Schedule,
    cube: &MainloopCube,
    places: &RowPlaces,
    row: u32,
    len: u32,
) -> MainloopRows {
    MainloopRows {
        outer: cube.batch * schedule.slice.heads as u32 + cube.outer,
        row,
        rows: StoredRows {
            place: places.upper,
            place8: places.lower,
            listing: Listing {
                stride: schedule.plan.listing.stride,
                class_len: schedule.plan.listing.class_len,
            },
            len,
            lane: cube.lane,
        },
    }
}
