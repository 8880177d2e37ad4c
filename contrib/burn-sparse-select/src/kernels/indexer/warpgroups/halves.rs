//! Sums of bf16 and f16. A cube's keys are in shared memory; all warps copy columns, two steps ahead.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use crate::kernels::indexer::mma::SumTile;
use crate::kernels::indexer::pairs::{Ending, Epilogue, PairInputs, PairSizes, Sizes};
use crate::kernels::indexer::warpgroups::heads::{HeadSums, Keys, no_totals, totals_of, write_two};
use crate::kernels::indexer::warpgroups::order::{Order, StepOrder, Work, is_seen, run_from};
use crate::kernels::indexer::warpgroups::{
    COLUMN_SPAN, COLUMNS, GROUP_KEYS, KEY_SPAN, UNITS, WARPGROUPS, WARPS, WIDTH, share, takes,
};
use blocksparse_cubecl::arch::sm80::copy_word;
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::{ROWS_AT_A_TIME, copies_are_there, copy_row, lane_row};
use blocksparse_cubecl::mma::tile::NOWHERE;
use blocksparse_cubecl::prelude::*;

/// Number of stages: one is multiplied and two are copied, while some warps may still read the one before.
const STAGES: usize = 4;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupSums {
    half: Half,
    of: HeadSums,
    /// True to include keys after a query's position.
    all: bool,
}

impl GroupSums {
    /// Returns the parameters of the sums of `tile`, if warpgroups serve them.
    pub fn new(client: &Client, sizes: &PairSizes, tile: &SumTile) -> Option<Self> {
        let found = Self {
            half: tile.half(),
            of: HeadSums {
                heads: sizes.heads[0],
                is_weights: tile.is_weights(),
            },
            all: tile.all(),
        };
        takes(client, sizes, found.shared_bytes()).then_some(found)
    }

    fn ring_offset(&self) -> usize {
        WARPGROUPS * KEY_SPAN.bytes()
    }

    /// Returns the offset of the `of_rows` entries of the stages' columns.
    fn of_rows(&self) -> usize {
        self.ring_offset() + STAGES * COLUMN_SPAN.bytes()
    }

    /// Returns the offset of the barriers, one per stage.
    fn full(&self) -> usize {
        self.of_rows() + STAGES * COLUMNS * 4
    }

    fn shared_bytes(&self) -> usize {
        self.full() + STAGES * 8
    }
}

/// Computes [`pair_sums`](crate::kernels::indexer::pair_sums). `q` and `k` are words.
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
    let mut next = CUBE_POS * order.share;
    let last = (next + order.share).min(s.batch * order.steps);
    let mut before = 0u32.runtime();
    while next < last {
        let run = run_from(next, last, &order, &s, comptime!(t.of.queries()), t.all);
        let steps = run.steps;
        let work = Work {
            run,
            before,
            q: global_address::<u32>(q),
            of_rows: global_address::<f32>(of_rows),
            base,
            warp,
            lane,
        };
        // After this no warp reads keys or queries of the previous work.
        sync_cube();
        mainloop::<N>(global_address::<u32>(k), out, &work, &s, &ending, t);
        before += steps as u32;
        next += steps;
    }
}

/// Computes the sums of a run.
#[cube]
fn mainloop<N: Size>(
    keys: u64,
    out: &mut [f32],
    work: &Work,
    s: &Sizes,
    ending: &Ending,
    #[comptime] t: GroupSums,
) {
    let (own_span, of_columns) = comptime!((KEY_SPAN, COLUMN_SPAN));
    let (base, warp, lane) = (work.base, work.warp, work.lane);
    let full = base + comptime!(t.full() as u32);
    let group = warp / 4;
    let own_keys = base + group * comptime!(own_span.bytes() as u32);
    let group_column = work.run.column0 + group as usize * comptime!(GROUP_KEYS);
    #[unroll]
    for i in 0..comptime!(16 / ROWS_AT_A_TIME) {
        let row = warp % 4 * 16 + comptime!((i * ROWS_AT_A_TIME) as u32) + lane_row(lane);
        let column = group_column + row as usize;
        let place = (work.run.entry * s.seq_kv + column) as u32;
        let place = select(column < s.columns, place, comptime!(NOWHERE).runtime());
        let stride = comptime!(WIDTH as u64 / 8).runtime();
        copy_row(own_keys, row, keys, place, stride, lane, own_span);
    }
    copy_queries(0usize, work, s, t);
    // All warps of a group read each warp's keys, after the barrier of the first step.
    let stage0 = work.before % comptime!(STAGES as u32);
    copies_are_there(full + stage0 * 8, lane);
    if work.run.steps > 1 {
        copy_queries(1usize, work, s, t);
    }

    let k_desc = descriptor(own_keys, 16usize);
    let q_desc = descriptor(base + comptime!(t.ring_offset() as u32), 16usize);
    // The unit's two columns of each group of eight.
    let pair = base + comptime!(t.of_rows() as u32) + lane % 4 * 8;
    let warp_column = group_column + (warp % 4 * 16) as usize;
    for at in 0..work.run.steps {
        let step = work.before + at as u32;
        let stage = step % comptime!(STAGES as u32);
        let next = (step + 1) % comptime!(STAGES as u32);
        let phase = step / comptime!(STAGES as u32) % 2;
        barrier_wait(full + stage * 8, phase);
        if at + 1 < work.run.steps {
            copies_are_there(full + next * 8, lane);
        }
        if at + 2 < work.run.steps {
            copy_queries(at + 2, work, s, t);
        }
        let row = work.run.first + at * comptime!(t.of.queries());
        if is_seen(group_column, row, s, comptime!(t.of.queries()), t.all) {
            let within = u64::cast_from(stage * comptime!((of_columns.bytes() >> 4) as u32));
            let started = product::<N>(
                k_desc,
                q_desc + within,
                comptime!(own_span.product(of_columns, t.half, WIDTH)),
            );
            let products = wait::<N>(started, 0usize, comptime!(COLUMNS / 2));
            let own_pair = pair + stage * comptime!((COLUMNS * 4) as u32);
            let keys = Keys {
                entry: work.run.entry,
                first: warp_column,
                lane,
                scale: 1.0f32,
            };
            let queries = comptime!(t.of.queries());
            #[unroll]
            for two in 0..comptime!(queries.div_ceil(2)) {
                let query = comptime!(2 * two);
                let own = totals_of::<N>(&products, own_pair, query, ending, t.of);
                let row = row + query;
                if comptime!(query + 1 < queries) {
                    let query = comptime!(query + 1);
                    let next = totals_of::<N>(&products, own_pair, query, ending, t.of);
                    write_two(own, next, out, row, &keys, s, ending, true, t.of);
                } else {
                    write_two(own, no_totals(), out, row, &keys, s, ending, false, t.of);
                }
            }
        }
    }
}

/// Starts to copy the rows of a step with their `of_rows` entries.
#[cube]
fn copy_queries(at: usize, work: &Work, s: &Sizes, #[comptime] t: GroupSums) {
    let of_columns = comptime!(COLUMN_SPAN);
    let stage = (work.before + at as u32) % comptime!(STAGES as u32);
    let row0 = work.run.first + at * comptime!(t.of.queries());
    let matrix = work.base
        + comptime!(t.ring_offset() as u32)
        + stage * comptime!(of_columns.bytes() as u32);
    let heads = work.run.entry * s.heads * s.seq_q + s.start;
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
            // A weight of 0, or an lse of +∞, which makes all exponentials 0.
            let none = comptime!(if t.of.is_weights { f32::INFINITY } else { 0.0 });
            shared_store(target, comptime!(none.to_bits()).runtime());
        }
    }
}

/// Returns the row in memory of a step's column, or [`NOWHERE`].
#[cube]
fn place_of(column: u32, heads: usize, row0: usize, s: &Sizes, #[comptime] t: GroupSums) -> u32 {
    let head = column as usize % comptime!(t.of.heads);
    let row = row0 + column as usize / comptime!(t.of.heads);
    let place = (heads + head * s.seq_q + row) as u32;
    select(row < s.rows, place, comptime!(NOWHERE).runtime())
}

/// Launches the sums.
pub(crate) fn launch(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    epilogue: Epilogue,
    out: &Handle,
    t: GroupSums,
) -> Result<(), KernelError> {
    let order = Order::new(sizes, t.of.queries(), t.all);
    let steps = sizes.batch * order.steps();
    let share = share(client, steps);
    let cubes = steps.div_ceil(share);
    let [q, k] = sizes.inputs();
    let address = address_of(client, q.max(k).max(sizes.elements()).max(2 * steps))?;
    let cubes = spread(client, cubes as u64)?;
    // SAFETY: a unit copies pieces of existing rows of queries and keys, and writes its own entries of existing rows and columns. The buffers have the lengths
    // that `buffer` gets.
    unsafe {
        sums::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            COLUMNS / 2,
            buffer(inputs.q, q / 2),
            buffer(inputs.k, k / 2),
            buffer(inputs.of_rows, sizes.row_elements()),
            buffer(out, sizes.elements()),
            sizes.launch(),
            order.launch(share),
            epilogue.ending(t.of.is_weights),
            t,
        );
    }
    Ok(())
}
