//! Sums over many heads on wgmma, for GPUs of compute capability 9.0: of bf16 and f16, over all keys that queries see.
//!
//! Cubes stay to the end of a launch and share its steps evenly. A cube has 256 keys at a time, 64 to a warpgroup, in shared memory. Columns are queries by heads, 128 a step, copied two steps ahead by all warps
//! and read by all warpgroups. What each wants of a step is a number of a key and a query: a unit adds what its columns of a query give, and three neighbours
//! the others.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::ending::{Ending, finished, term};
use super::mma::SumTile;
use super::pairs::{PairInputs, PairSizes, Sizes};
use super::wanted::Epilogue;
use crate::kernels::args::{address_of, buffer, spread};
use crate::kernels::call::{TierLimit, check_hopper};
use crate::kernels::error::KernelError;
use crate::kernels::hopper::asm::*;
use crate::kernels::hopper::swizzled::{
    ROWS_AT_A_TIME, Spans, copies_are_there, copy_row, lane_row,
};
use crate::kernels::mma::asm::{copy_word, shared_load_pair};
use crate::kernels::mma::tile::NOWHERE;

/// Warpgroups of a cube, keys of each, and of all.
const WARPGROUPS: usize = 4;
const GROUP_KEYS: usize = 64;
const TILE_KEYS: usize = WARPGROUPS * GROUP_KEYS;
const WARPS: usize = 4 * WARPGROUPS;
const UNITS: usize = 32 * WARPS;

/// Columns of a step: queries by heads.
const COLUMNS: usize = 128;
/// Of which so many lie side by side in a unit's registers.
const EIGHT: usize = 8;

/// Numbers of a query or a key.
const WIDTH: usize = 128;

/// Steps that there is room for: one is multiplied and two are on their way, while some warps may still have the one before.
const STAGES: usize = 4;

/// What is compiled into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupSums {
    half: Half,
    /// Heads of a query: a multiple of 8 that divides the columns.
    heads: usize,
    is_weights: bool,
    /// Keys behind a query's position count.
    all: bool,
}

impl GroupSums {
    /// How warpgroups make the sums that `tile` makes, if they do.
    pub fn new(client: &Client, sizes: &PairSizes, tile: &SumTile) -> Option<Self> {
        let properties = client.properties();
        let is_left_out = TierLimit::from_env().is_ok_and(|limit| limit == TierLimit::Mma);
        if is_left_out || check_hopper(properties).is_err() {
            return None;
        }
        let found = Self::of(sizes, tile)?;
        (found.shared_bytes() <= properties.hardware.max_shared_memory_size).then_some(found)
    }

    fn of(sizes: &PairSizes, tile: &SumTile) -> Option<Self> {
        let [heads, kv_heads] = sizes.heads;
        let divides = heads.is_multiple_of(EIGHT) && COLUMNS.is_multiple_of(heads.max(1));
        // Of narrower rows what is made of products takes longer than these, and mma.sync is as fast.
        let is_taken = kv_heads == 1 && divides && sizes.width == WIDTH && !tile.is_listed();
        is_taken.then(|| Self {
            half: tile.half(),
            heads,
            is_weights: tile.is_weights(),
            all: tile.all(),
        })
    }

    /// Queries of a step.
    fn queries(&self) -> usize {
        COLUMNS / self.heads
    }

    /// The keys of a warpgroup. Those of the first are at the beginning, and so on.
    fn keys(&self) -> Spans {
        Spans {
            rows: GROUP_KEYS,
            dim: WIDTH,
            far: false,
        }
    }

    /// The rows of a step.
    fn columns(&self) -> Spans {
        Spans {
            rows: COLUMNS,
            ..self.keys()
        }
    }

    fn ring_offset(&self) -> usize {
        WARPGROUPS * self.keys().bytes()
    }

    /// What each column of a step has in `of_rows`.
    fn of_rows(&self) -> usize {
        self.ring_offset() + STAGES * self.columns().bytes()
    }

    /// A barrier for each step.
    fn full(&self) -> usize {
        self.of_rows() + STAGES * COLUMNS * 4
    }

    fn shared_bytes(&self) -> usize {
        self.full() + STAGES * 8
    }
}

/// The steps of a batch entry: those of the first keys first, and of the same keys in the order of their queries. Queries before the first that sees a key of a
/// tile are left out.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct StepOrder {
    /// Steps of a batch entry, and of a cube.
    steps: usize,
    share: usize,
    tiles: usize,
    /// Tiles that all queries see, and the steps of each.
    whole: usize,
    most: usize,
    /// The steps that a tile behind them would have, were it the first.
    from: usize,
}

/// [`StepOrder`] on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    tiles: usize,
    whole: usize,
    most: usize,
    from: usize,
    /// By how many steps a tile that not all queries see has fewer than the one before.
    fewer: usize,
}

impl Order {
    fn new(sizes: &PairSizes, t: &GroupSums) -> Self {
        let queries = t.queries();
        let [start, rows] = sizes.rows;
        let position = start + sizes.seq[1] - sizes.seq[0];
        let tiles = sizes.columns().div_ceil(TILE_KEYS);
        let (tiles, whole) = match t.all {
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

    /// Steps of tiles before one.
    fn before(&self, tile: usize) -> usize {
        let whole = tile.min(self.whole);
        let numbers = (tile * tile.saturating_sub(1)) - (whole * whole.saturating_sub(1));
        whole * self.most + (tile - whole) * self.from - self.fewer * (numbers / 2)
    }

    fn launch(&self, share: usize) -> StepOrderLaunch {
        let steps = self.before(self.tiles);
        StepOrderLaunch::new(steps, share, self.tiles, self.whole, self.most, self.from)
    }
}

#[cube]
impl StepOrder {
    /// As [`Order::before`].
    fn before(&self, tile: usize, #[comptime] fewer: usize) -> usize {
        let whole = tile.min(self.whole);
        // Of tiles before the first there are none.
        let below = tile * (max(tile, 1) - 1) - whole * (max(whole, 1) - 1);
        whole * self.most + (tile - whole) * self.from - below / 2 * fewer
    }

    /// The tile of a step of a batch entry.
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

/// What a cube works on: steps of the same keys.
#[derive(CubeType, Clone, Copy)]
struct Work {
    entry: usize,
    /// The first query.
    first: usize,
    /// Steps, and those that the cube had before.
    steps: usize,
    before: u32,
    /// Addresses of queries, and of what they have in `of_rows`.
    q: u64,
    of_rows: u64,
    /// Shared memory.
    base: u32,
    warp: u32,
    lane: u32,
}

/// As [`pair_sums`](super::pair_sums) says. `q` and `k` are in words.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sums<N: Size>(
    q: &[u32],
    k: &[u32],
    of_rows: &[f32],
    out: &mut [f32],
    s: Sizes,
    order: StepOrder,
    ending: Ending,
    #[comptime] t: GroupSums,
) {
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let full = base + comptime!(t.full() as u32);
    if UNIT_POS_X == 0 {
        #[unroll]
        for i in 0..comptime!(STAGES as u32) {
            barrier_init(full + comptime!(8 * i), comptime!(WARPS as u32));
        }
        barrier_fence();
    }
    let fewer = comptime!(TILE_KEYS / t.queries());
    let mut next = CUBE_POS * order.share;
    let last = (next + order.share).min(s.batch * order.steps);
    let mut before = 0u32.runtime();
    while next < last {
        let entry = next / order.steps;
        let step = next % order.steps;
        let tile = order.tile(step, fewer);
        let skipped = order.before(tile, fewer);
        let steps = (order.before(tile + 1, fewer) - step).min(last - next);
        let column0 = tile * TILE_KEYS;
        let mut first = 0usize.runtime();
        if comptime!(!t.all) {
            let position = s.position(0usize);
            first = max(column0, position) - position;
        }
        let work = Work {
            entry,
            first: first + (step - skipped) * comptime!(t.queries()),
            steps,
            before,
            q: global_address::<u32>(q),
            of_rows: global_address::<f32>(of_rows),
            base,
            warp,
            lane,
        };
        // Nobody reads keys or queries of the work before.
        sync_cube();
        walk::<N>(
            global_address::<u32>(k),
            out,
            column0,
            &work,
            &s,
            &ending,
            t,
        );
        before += steps as u32;
        next += steps;
    }
}

/// Makes the sums of the keys from `column0` on.
#[cube]
fn walk<N: Size>(
    keys: u64,
    out: &mut [f32],
    column0: usize,
    work: &Work,
    s: &Sizes,
    ending: &Ending,
    #[comptime] t: GroupSums,
) {
    let (own_span, of_columns) = comptime!((t.keys(), t.columns()));
    let (base, warp, lane) = (work.base, work.warp, work.lane);
    let full = base + comptime!(t.full() as u32);
    let group = warp / 4;
    let own_keys = base + group * comptime!(own_span.bytes() as u32);
    let group_column = column0 + group as usize * comptime!(GROUP_KEYS);
    #[unroll]
    for i in 0..comptime!(16 / ROWS_AT_A_TIME) {
        let row = warp % 4 * 16 + comptime!((i * ROWS_AT_A_TIME) as u32) + lane_row(lane);
        let column = group_column + row as usize;
        let place = (work.entry * s.seq_kv + column) as u32;
        let place = select(column < s.columns, place, comptime!(NOWHERE).runtime());
        let stride = comptime!(WIDTH as u64 / 8).runtime();
        copy_row(own_keys, row, keys, place, stride, lane, own_span);
    }
    copy_queries(0usize, work, s, t);
    // A warp's keys are read by all of its group, behind the barrier of the first step.
    let stage0 = work.before % comptime!(STAGES as u32);
    copies_are_there(full + stage0 * 8, lane);
    if work.steps > 1 {
        copy_queries(1usize, work, s, t);
    }

    let k_desc = descriptor(own_keys, 16usize);
    let q_desc = descriptor(base + comptime!(t.ring_offset() as u32), 16usize);
    // The unit's two columns of each eight.
    let pair = base + comptime!(t.of_rows() as u32) + lane % 4 * 8;
    let warp_column = group_column + (warp % 4 * 16) as usize;
    for at in 0..work.steps {
        let step = work.before + at as u32;
        let stage = step % comptime!(STAGES as u32);
        let next = (step + 1) % comptime!(STAGES as u32);
        let phase = step / comptime!(STAGES as u32) % 2;
        barrier_wait(full + stage * 8, phase);
        if at + 1 < work.steps {
            copies_are_there(full + next * 8, lane);
        }
        if at + 2 < work.steps {
            copy_queries(at + 2, work, s, t);
        }
        let row = work.first + at * comptime!(t.queries());
        let mut is_seen = 1u32.runtime();
        if comptime!(!t.all) {
            // The last query's position is the highest.
            let last = s.position(row + comptime!(t.queries() - 1));
            is_seen = uniform(select(group_column <= last, 1u32, 0u32));
        }
        if is_seen != 0u32 {
            let within = u64::cast_from(stage * comptime!((of_columns.bytes() >> 4) as u32));
            let started = product::<N>(
                k_desc,
                q_desc + within,
                t.half,
                WIDTH,
                comptime!(own_span.span_bytes()),
                comptime!(of_columns.span_bytes()),
            );
            let products = wait::<N>(started, 0usize, comptime!(COLUMNS / 2));
            let own_pair = pair + stage * comptime!((COLUMNS * 4) as u32);
            add_up::<N>(
                &products,
                out,
                own_pair,
                row,
                warp_column,
                work,
                s,
                ending,
                t,
            );
        }
    }
}

/// Starts to copy the rows of a step, with what each has in `of_rows`.
#[cube]
fn copy_queries(at: usize, work: &Work, s: &Sizes, #[comptime] t: GroupSums) {
    let of_columns = comptime!(t.columns());
    let stage = (work.before + at as u32) % comptime!(STAGES as u32);
    let row0 = work.first + at * comptime!(t.queries());
    let matrix = work.base
        + comptime!(t.ring_offset() as u32)
        + stage * comptime!(of_columns.bytes() as u32);
    let heads = work.entry * s.heads * s.seq_q + s.start;
    #[unroll]
    for i in 0..comptime!(COLUMNS / WARPS / ROWS_AT_A_TIME) {
        let first = comptime!((i * ROWS_AT_A_TIME) as u32);
        let column = work.warp * comptime!((COLUMNS / WARPS) as u32) + first + lane_row(work.lane);
        let place = place_of(column, heads, row0, s, t);
        let stride = comptime!(WIDTH as u64 / 8).runtime();
        copy_row(matrix, column, work.q, place, stride, work.lane, of_columns);
    }
    let column = unit();
    if column < comptime!(COLUMNS as u32) {
        let target = work.base
            + comptime!(t.of_rows() as u32)
            + stage * comptime!((COLUMNS * 4) as u32)
            + column * 4;
        let place = place_of(column, heads, row0, s, t);
        if place != comptime!(NOWHERE) {
            copy_word(target, work.of_rows + u64::cast_from(place) * 4);
        } else {
            // A weight of 0; or a sum of exponentials beside which all are 0.
            let none = comptime!(if t.is_weights { f32::INFINITY } else { 0.0 });
            shared_store(target, comptime!(none.to_bits()).runtime());
        }
    }
}

/// The row in memory of a column of a step, or [`NOWHERE`].
#[cube]
fn place_of(column: u32, heads: usize, row0: usize, s: &Sizes, #[comptime] t: GroupSums) -> u32 {
    let head = column as usize % comptime!(t.heads);
    let row = row0 + column as usize / comptime!(t.heads);
    let place = (heads + head * s.seq_q + row) as u32;
    select(row < s.rows, place, comptime!(NOWHERE).runtime())
}

/// Adds up what the heads of each query of a step give, and writes it.
#[cube]
fn add_up<N: Size>(
    products: &Vector<f32, N>,
    out: &mut [f32],
    pair: u32,
    row0: usize,
    warp_column: usize,
    work: &Work,
    s: &Sizes,
    ending: &Ending,
    #[comptime] t: GroupSums,
) {
    let queries = comptime!(t.queries());
    let eights = comptime!(t.heads / EIGHT);
    // Of each query those of the unit's two keys, over all of its heads in the end.
    let mut totals = Array::<f32>::new(comptime!((2 * queries).next_multiple_of(4)));
    #[unroll]
    for i in 0..comptime!((2 * queries).next_multiple_of(4)) {
        totals[i] = 0.0f32;
    }
    #[unroll]
    for query in 0..queries {
        #[unroll]
        for eight in 0..eights {
            let n = comptime!(query * eights + eight);
            let of_rows = shared_load_pair(pair + comptime!((n * EIGHT * 4) as u32));
            let mut first = f32::reinterpret(of_rows.extract(0usize));
            let mut second = f32::reinterpret(of_rows.extract(1usize));
            if comptime!(t.is_weights) {
                first *= comptime!(std::f32::consts::LOG2_E);
                second *= comptime!(std::f32::consts::LOG2_E);
            }
            #[unroll]
            for half in 0..2usize {
                let at = comptime!(4 * n + 2 * half);
                let total = comptime!(2 * query + half);
                let one = products.extract(at);
                let other = products.extract(comptime!(at + 1));
                totals[total] += term(one, first, ending, t.is_weights);
                totals[total] += term(other, second, ending, t.is_weights);
            }
        }
        #[unroll]
        for half in 0..2usize {
            let total = comptime!(2 * query + half);
            let sum = totals[total] + shuffle_xor(totals[total], 1u32);
            totals[total] = sum + shuffle_xor(sum, 2u32);
        }
    }
    // Each of the lanes that share sums writes others of them.
    let own = work.lane as usize % 4;
    #[unroll]
    for four in 0..comptime!((2 * queries).div_ceil(4)) {
        let mut sum = totals[comptime!(4 * four)];
        #[unroll]
        for i in 1..4usize {
            sum = select(own == i, totals[comptime!(4 * four + i)], sum);
        }
        let total = comptime!(4 * four) + own;
        let row = row0 + total / 2;
        let column = warp_column + work.lane as usize / 4 + total % 2 * 8;
        if total < comptime!(2 * queries) && row < s.rows && column < s.columns {
            let (key, position) = (column as i32, s.position(row));
            let sum = finished(sum, key, position, s.heads, ending, t.is_weights);
            out[(work.entry * s.rows + row) * s.columns + column] = sum;
        }
    }
}

/// Makes the sums.
///
/// # Errors
/// As [`mma::launch`](super::mma::launch)'s.
pub(super) fn launch(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    epilogue: Epilogue,
    out: &Handle,
    t: GroupSums,
) -> Result<(), KernelError> {
    let order = Order::new(sizes, &t);
    let steps = sizes.batch * order.before(order.tiles);
    // Shared memory has room for one cube, which stays to the end.
    let known = client.properties().hardware.num_streaming_multiprocessors;
    let share = steps
        .div_ceil(known.map_or(1, |known| known as usize))
        .max(1);
    let cubes = steps.div_ceil(share);
    let [q, k] = sizes.inputs();
    let address = address_of(client, q.max(k).max(sizes.numbers()).max(2 * steps))?;
    let cubes = spread(client, cubes as u64)?;
    // SAFETY: a unit copies pieces of rows of queries and keys that there are, and writes its own numbers of rows and columns that there are. The buffers have
    // the lengths they say (see `buffer`).
    unsafe {
        sums::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            COLUMNS / 2,
            buffer(inputs.q, q / 2),
            buffer(inputs.k, k / 2),
            buffer(inputs.of_rows, sizes.row_numbers()),
            buffer(out, sizes.numbers()),
            sizes.launch(),
            order.launch(share),
            epilogue.ending(t.is_weights),
            t,
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_before_a_tile_are_those_of_the_tiles_before() {
        for (heads, all) in [(64, false), (8, false), (128, false), (32, true)] {
            let t = GroupSums {
                half: Half::Bf16,
                heads,
                is_weights: false,
                all,
            };
            for (seq, rows) in [
                ([65, 530], [0, 40]),
                ([600, 600], [0, 600]),
                ([3000, 3000], [257, 700]),
                ([1, 9000], [0, 1]),
                ([700, 1100], [699, 1]),
            ] {
                let (q, k) = ([1, heads, seq[0], WIDTH], [1, 1, seq[1], WIDTH]);
                let sizes = PairSizes::new(q, k, rows, None);
                let order = Order::new(&sizes, &t);
                let position = rows[0] + seq[1] - seq[0];
                let mut steps = 0;
                for tile in 0..order.tiles {
                    assert_eq!(order.before(tile), steps, "{heads} {seq:?} {rows:?} {tile}");
                    let first = (tile * TILE_KEYS).saturating_sub(position);
                    let first = if all { 0 } else { first };
                    assert!(first < rows[1], "a tile that nobody sees");
                    steps += (rows[1] - first).div_ceil(t.queries());
                }
                assert_eq!(order.before(order.tiles), steps);
                let seen = if all { seq[1] } else { position + rows[1] };
                assert_eq!(order.tiles, seen.div_ceil(TILE_KEYS));
            }
        }
    }
}
