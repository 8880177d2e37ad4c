//! Order of the steps of a launch.

use cubecl::prelude::*;

use crate::kernels::indexer::pairs::{PairSizes, Sizes};
use crate::kernels::indexer::warpgroups::TILE_KEYS;
use blocksparse_cubecl::arch::ptx::uniform;

/// Order of the steps of a batch entry: by tiles of keys, and within a tile by queries. Queries before the first that sees a key of a tile are left out.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct StepOrder {
    /// Number of steps of a batch entry, and of a cube.
    pub steps: usize,
    pub share: usize,
    tiles: usize,
    /// Number of tiles that all queries see, and steps of each.
    whole: usize,
    most: usize,
    /// Number of steps that a later tile would have if it were tile 0, by extrapolation.
    from: usize,
}

/// [`StepOrder`] on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Order {
    tiles: usize,
    whole: usize,
    most: usize,
    from: usize,
    /// Difference in steps from one tile to the next, for tiles that not all queries see.
    fewer: usize,
}

impl Order {
    /// Creates the order for steps of `queries` queries; `all` is true if queries see all keys, and false if those up to their positions.
    pub fn new(sizes: &PairSizes, queries: usize, all: bool) -> Self {
        let [start, rows] = sizes.rows;
        // With `all` there may be more queries than keys.
        let position = (start + sizes.seq[1]).saturating_sub(sizes.seq[0]);
        let tiles = sizes.columns().div_ceil(TILE_KEYS);
        let (tiles, whole) = match all {
            true => (tiles, tiles),
            false => (
                tiles.min((position + rows).div_ceil(TILE_KEYS)),
                position / TILE_KEYS + 1,
            ),
        };
        Self {
            tiles,
            whole: whole.min(tiles),
            most: rows.div_ceil(queries),
            from: (position + rows).div_ceil(queries),
            fewer: TILE_KEYS / queries,
        }
    }

    /// Returns the number of steps of tiles before `tile`.
    fn before(&self, tile: usize) -> usize {
        let whole = tile.min(self.whole);
        let numbers = (tile * tile.saturating_sub(1)) - (whole * whole.saturating_sub(1));
        whole * self.most + (tile - whole) * self.from - self.fewer * (numbers / 2)
    }

    /// Returns the number of steps of a batch entry.
    pub fn steps(&self) -> usize {
        self.before(self.tiles)
    }

    /// Returns launch arguments for cubes of `share` steps.
    pub fn launch(&self, share: usize) -> StepOrderLaunch {
        let steps = self.steps();
        StepOrderLaunch::new(steps, share, self.tiles, self.whole, self.most, self.from)
    }
}

#[cube]
impl StepOrder {
    /// See [`Order::before`].
    fn before(&self, tile: usize, #[comptime] fewer: usize) -> usize {
        let whole = tile.min(self.whole);
        // Avoids underflow for tile 0.
        let below = tile * (max(tile, 1) - 1) - whole * (max(whole, 1) - 1);
        whole * self.most + (tile - whole) * self.from - below / 2 * fewer
    }

    /// Returns the tile of a step of a batch entry.
    fn tile(&self, step: usize, #[comptime] fewer: usize) -> usize {
        let mut low = 0usize.runtime();
        let mut high = self.tiles;
        while low + 1 < high {
            let middle = (low + high) / 2;
            if self.before(middle, fewer) <= step {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// Consecutive steps over the same keys.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Run {
    pub entry: usize,
    /// First key.
    pub column0: usize,
    /// First query.
    pub first: usize,
    pub steps: usize,
}

/// Work of a cube.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Work {
    pub run: Run,
    /// Number of earlier steps of the cube.
    pub before: u32,
    /// Location of the queries, an address or a tensor map, and address of their `of_rows` entries.
    pub q: u64,
    pub of_rows: u64,
    /// Address of shared memory.
    pub base: u32,
    pub warp: u32,
    pub lane: u32,
}

/// Returns whether a query of the step that starts at `row` sees a key from `column` on, uniformly for a warp.
#[cube]
pub(crate) fn is_seen(
    column: usize,
    row: usize,
    s: &Sizes,
    #[comptime] queries: usize,
    #[comptime] all: bool,
) -> bool {
    let mut is_seen = 1u32.runtime();
    if comptime!(!all) {
        // The last query has the highest position.
        let last = s.position(row + comptime!(queries - 1));
        is_seen = uniform(select(column <= last, 1u32, 0u32));
    }
    is_seen != 0u32
}

/// Returns the steps of a launch from `next` on and before `last` that have the same keys. A step has `queries` queries; `all` is as in [`Order::new`].
#[cube]
pub(crate) fn run_from(
    next: usize,
    last: usize,
    order: &StepOrder,
    s: &Sizes,
    #[comptime] queries: usize,
    #[comptime] all: bool,
) -> Run {
    let fewer = comptime!(TILE_KEYS / queries);
    let step = next % order.steps;
    let tile = order.tile(step, fewer);
    let skipped = order.before(tile, fewer);
    let column0 = tile * TILE_KEYS;
    let mut first = 0usize.runtime();
    if comptime!(!all) {
        let position = s.position(0usize);
        first = max(column0, position) - position;
    }
    Run {
        entry: next / order.steps,
        column0,
        first: first + (step - skipped) * queries,
        steps: (order.before(tile + 1, fewer) - step).min(last - next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::indexer::warpgroups::{COLUMNS, WIDTH};

    #[test]
    fn steps_before_a_tile_are_those_of_the_tiles_before() {
        for (heads, all) in [(64, false), (8, false), (128, false), (32, true)] {
            let queries = COLUMNS / heads;
            for (seq, rows) in [
                ([65, 530], [0, 40]),
                ([600, 600], [0, 600]),
                ([3000, 3000], [257, 700]),
                ([1, 9000], [0, 1]),
                ([700, 1100], [699, 1]),
            ] {
                let (q, k) = ([1, heads, seq[0], WIDTH], [1, 1, seq[1], WIDTH]);
                let sizes = PairSizes::new(q, k, rows, None);
                let order = Order::new(&sizes, queries, all);
                let position = rows[0] + seq[1] - seq[0];
                let mut steps = 0;
                for tile in 0..order.tiles {
                    assert_eq!(order.before(tile), steps, "{heads} {seq:?} {rows:?} {tile}");
                    let first = (tile * TILE_KEYS).saturating_sub(position);
                    let first = if all { 0 } else { first };
                    assert!(first < rows[1], "a tile that nobody sees");
                    steps += (rows[1] - first).div_ceil(queries);
                }
                assert_eq!(order.steps(), steps);
                let seen = if all { seq[1] } else { position + rows[1] };
                assert_eq!(order.tiles, seen.div_ceil(TILE_KEYS));
            }
        }
    }
}
