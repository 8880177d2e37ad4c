//! Sums of bf16 and f16 over the keys of blocks that queries list. A cube has a block's keys; the queries that list it are streamed, and their sums are written
//! at the block's index in their lists. Two cubes share a multiprocessor, so that one copies and adds while the other multiplies.

// Kernels have no `is_multiple_of`.
#![allow(clippy::manual_is_multiple_of)]

use crate::kernels::indexer::pairs::{Ending, Epilogue, PairInputs, PairSizes, Sizes, finished};
use crate::kernels::indexer::warpgroups::heads::{
    HeadSums, Totals, no_totals, own_key, totals_of, traded,
};
use crate::kernels::indexer::warpgroups::{
    COLUMN_SPAN, COLUMNS, GROUP_KEYS, KEY_SPAN, WARPGROUPS, WIDTH, takes,
};
use blocksparse_cubecl::arch::ptx::shared_load;
use blocksparse_cubecl::arch::sm80::copy_word;
use blocksparse_cubecl::arch::sm90::*;
use blocksparse_cubecl::arch::swizzled::{ROWS_AT_A_TIME, copy_row, lane_row, own_copies};
use blocksparse_cubecl::mma::tile::NOWHERE;
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::tensor::half_of;
use blocksparse_cubecl::tuning::Tuning;

/// Number of places of a tile, which a cube processes: queries that list its block.
pub(crate) const PLACES: usize = 64;
/// Number of stages: one is multiplied while the next is copied.
const STAGES: usize = 2;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockSums {
    half: Half,
    of: HeadSums,
    /// Number of keys of a block.
    block: usize,
}

impl BlockSums {
    /// Returns the parameters for blocks of `block` keys, if warpgroups serve the call.
    pub fn new(
        client: &Client,
        element: ElemType,
        sizes: &PairSizes,
        block: usize,
    ) -> Option<Self> {
        let all = PairSizes {
            listed: None,
            ..*sizes
        };
        let sizes_of_blocks = GROUP_KEYS..=WARPGROUPS * GROUP_KEYS;
        let is_whole = block.is_power_of_two() && sizes_of_blocks.contains(&block);
        let is_left_out = Tuning::or_default().tier.is_simt();
        let found = Self {
            half: half_of(element).ok()?,
            of: HeadSums {
                heads: sizes.heads[0],
                is_weights: false,
            },
            block,
        };
        let is_taken = is_whole && !is_left_out && takes(client, &all, found.shared_bytes());
        is_taken.then_some(found)
    }

    fn warps(&self) -> usize {
        self.block / GROUP_KEYS * 4
    }

    fn ring_offset(&self) -> usize {
        self.block / GROUP_KEYS * KEY_SPAN.bytes()
    }

    /// Returns the offset of the weights of the stages' columns.
    fn of_rows(&self) -> usize {
        self.ring_offset() + STAGES * COLUMN_SPAN.bytes()
    }

    /// Returns the offset of the selection at each place; the query of each place follows.
    fn choices(&self) -> usize {
        self.of_rows() + STAGES * COLUMNS * 4
    }

    fn rows(&self) -> usize {
        self.choices() + PLACES * 4
    }

    fn shared_bytes(&self) -> usize {
        self.rows() + PLACES * 4
    }
}

/// Work of a cube.
#[derive(CubeType, Clone, Copy)]
struct Work {
    q: u64,
    of_rows: u64,
    /// Address of shared memory.
    base: u32,
    warp: u32,
    lane: u32,
}

/// Computes the sums of each tile's block. `q` and `k` are words. A selection is `row · count` plus the block's index in the row's list of `count`; negative
/// entries are empty and come last in a tile.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sums<N: Size>(
    q: &[u32],
    k: &[u32],
    of_rows: &[f32],
    choices: &[i32],
    tile_blocks: &[i32],
    out: &mut [f32],
    s: Sizes,
    tiles: usize,
    count: usize,
    ending: Ending,
    #[comptime] t: BlockSums,
) {
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 1024usize);
    let tile = CUBE_POS.min(tiles - 1);
    let block = tile_blocks[tile];
    // Surplus cubes and tiles without a block do nothing.
    if CUBE_POS < tiles && block >= 0i32 {
        let work = Work {
            q: global_address::<u32>(q),
            of_rows: global_address::<f32>(of_rows),
            base: shared_address(&smem),
            warp: uniform(UNIT_POS_X / 32),
            lane: UNIT_POS_X % 32,
        };
        if UNIT_POS_X < comptime!(PLACES as u32) {
            let choice = choices[tile * PLACES + UNIT_POS_X as usize];
            let row = (max(choice, 0i32) as usize / count) as u32;
            let row = select(choice < 0i32, comptime!(NOWHERE).runtime(), row);
            let at = work.base + UNIT_POS_X * 4;
            shared_store(at + comptime!(t.choices() as u32), choice as u32);
            shared_store(at + comptime!(t.rows() as u32), row);
        }
        let first = block as usize * comptime!(t.block);
        copy_keys(global_address::<u32>(k), first, &work, &s);
        sync_cube();
        copy_queries(0usize, &work, &s, t);
        mainloop::<N>(out, &work, &s, &ending, t);
    }
}

/// Computes the sums of a tile.
#[cube]
fn mainloop<N: Size>(
    out: &mut [f32],
    work: &Work,
    s: &Sizes,
    ending: &Ending,
    #[comptime] t: BlockSums,
) {
    let (own_span, of_columns) = comptime!((KEY_SPAN, COLUMN_SPAN));
    let queries = comptime!(t.of.queries());
    let group = work.warp / 4;
    let own_keys = work.base + group * comptime!(own_span.bytes() as u32);
    let k_desc = descriptor(own_keys, 16usize);
    let q_desc = descriptor(work.base + comptime!(t.ring_offset() as u32), 16usize);
    // The unit's two columns of each group of eight.
    let pair = work.base + comptime!(t.of_rows() as u32) + work.lane % 4 * 8;
    let warp_key = group as usize * GROUP_KEYS + (work.warp % 4 * 16) as usize;
    let mut at = 0usize.runtime();
    let mut goes_on = true.runtime();
    while goes_on {
        // The stage has arrived, and no warp reads the one before any more.
        own_copies();
        sync_cube();
        let next = at + 1;
        goes_on = false.runtime();
        if next < comptime!(PLACES / t.of.queries()) {
            goes_on = row_at(next * queries, work, t) != NOWHERE;
        }
        if goes_on {
            copy_queries(next, work, s, t);
        }
        let stage = at as u32 % comptime!(STAGES as u32);
        let within = u64::cast_from(stage * comptime!((of_columns.bytes() >> 4) as u32));
        let started = product::<N>(
            k_desc,
            q_desc + within,
            comptime!(own_span.product(of_columns, t.half, WIDTH)),
        );
        let products = wait::<N>(started, 0usize, comptime!(COLUMNS / 2));
        let pair = pair + stage * comptime!((COLUMNS * 4) as u32);
        #[unroll]
        for two in 0..comptime!(queries.div_ceil(2)) {
            let query = comptime!(2 * two);
            let first = totals_of::<N>(&products, pair, query, ending, t.of);
            let place = at * queries + query;
            if comptime!(query + 1 < queries) {
                let second = totals_of::<N>(&products, pair, comptime!(query + 1), ending, t.of);
                write(first, second, out, place, warp_key, work, ending, true, t);
            } else {
                write(
                    first,
                    no_totals(),
                    out,
                    place,
                    warp_key,
                    work,
                    ending,
                    false,
                    t,
                );
            }
        }
        at = next;
    }
}

/// Writes the sums of the queries at one or two places.
#[cube]
fn write(
    first: Totals,
    second: Totals,
    out: &mut [f32],
    place: usize,
    warp_key: usize,
    work: &Work,
    ending: &Ending,
    #[comptime] both: bool,
    #[comptime] t: BlockSums,
) {
    let sum = traded(first, second, work.lane);
    let second = work.lane % 4 / 2;
    let at = comptime!(t.choices() as u32) + place as u32 * 4;
    let mut choice = -1i32.runtime();
    if comptime!(both) {
        choice = shared_load(work.base + at + second * 4) as i32;
    } else if second == 0u32 {
        choice = shared_load(work.base + at) as i32;
    }
    if choice >= 0i32 {
        let key = own_key(warp_key, work.lane);
        // None of these keys is near, whatever the position.
        let sum = finished(sum, 0i32, 0usize, 1usize, ending, false);
        out[choice as usize * comptime!(t.block) + key] = sum;
    }
}

/// Returns the query at a place, or [`NOWHERE`].
#[cube]
fn row_at(place: usize, work: &Work, #[comptime] t: BlockSums) -> u32 {
    shared_load(work.base + comptime!(t.rows() as u32) + place as u32 * 4)
}

/// Starts to copy the keys of a block from `first` on, with zeros after the last key.
#[cube]
fn copy_keys(k: u64, first: usize, work: &Work, s: &Sizes) {
    let own_span = comptime!(KEY_SPAN);
    let group = work.warp / 4;
    let own_keys = work.base + group * comptime!(own_span.bytes() as u32);
    #[unroll]
    for i in 0..comptime!(16 / ROWS_AT_A_TIME) {
        let row = work.warp % 4 * 16 + comptime!((i * ROWS_AT_A_TIME) as u32) + lane_row(work.lane);
        let key = first + (group * comptime!(GROUP_KEYS as u32) + row) as usize;
        let place = select(key < s.seq_kv, key as u32, comptime!(NOWHERE).runtime());
        let stride = comptime!(WIDTH as u64 / 8).runtime();
        copy_row(own_keys, row, k, place, stride, work.lane, own_span);
    }
}

/// Starts to copy the rows of a step with their weights.
#[cube]
fn copy_queries(at: usize, work: &Work, s: &Sizes, #[comptime] t: BlockSums) {
    let of_columns = comptime!(COLUMN_SPAN);
    let stage = at as u32 % comptime!(STAGES as u32);
    let place0 = at * comptime!(t.of.queries());
    let matrix = work.base
        + comptime!(t.ring_offset() as u32)
        + stage * comptime!(of_columns.bytes() as u32);
    let own = comptime!(COLUMNS / t.warps());
    #[unroll]
    for i in 0..comptime!(own / ROWS_AT_A_TIME) {
        let first = comptime!((i * ROWS_AT_A_TIME) as u32);
        let column = work.warp * comptime!(own as u32) + first + lane_row(work.lane);
        let place = place_of(column, place0, work, s, t);
        let stride = comptime!(WIDTH as u64 / 8).runtime();
        copy_row(matrix, column, work.q, place, stride, work.lane, of_columns);
    }
    let column = unit();
    if column < comptime!(COLUMNS as u32) {
        let target = work.base
            + comptime!(t.of_rows() as u32)
            + stage * comptime!((COLUMNS * 4) as u32)
            + column * 4;
        let place = place_of(column, place0, work, s, t);
        if place != comptime!(NOWHERE) {
            copy_word(target, work.of_rows + u64::cast_from(place) * 4);
        } else {
            shared_store(target, 0u32.runtime());
        }
    }
}

/// Returns the row in memory of a step's column, or [`NOWHERE`].
#[cube]
fn place_of(column: u32, place0: usize, work: &Work, s: &Sizes, #[comptime] t: BlockSums) -> u32 {
    let head = column as usize % comptime!(t.of.heads);
    let row = row_at(place0 + column as usize / comptime!(t.of.heads), work, t);
    let place = (head * s.seq_q + s.start) as u32 + row;
    select(row == NOWHERE, comptime!(NOWHERE).runtime(), place)
}

/// Launches the sums of one batch entry, for the queries that selected the block of each tile.
pub(crate) fn launch_blocks(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    ([choices, tile_blocks], tiles): ([&Handle; 2], usize),
    epilogue: Epilogue,
    out: &Handle,
    t: BlockSums,
) -> Result<(), KernelError> {
    let [q, k] = sizes.inputs();
    let places = tiles * PLACES;
    let address = address_of(client, q.max(k).max(sizes.elements()).max(places))?;
    let cubes = spread(client, tiles as u64)?;
    // SAFETY: a unit copies pieces of existing rows of queries and keys, and writes its own entries at the positions of its block in the queries' lists. The
    // buffers have the lengths that `buffer` gets.
    unsafe {
        sums::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d((32 * t.warps()) as u32),
            address,
            COLUMNS / 2,
            buffer(inputs.q, q / 2),
            buffer(inputs.k, k / 2),
            buffer(inputs.of_rows, sizes.row_elements()),
            buffer(choices, places),
            buffer(tile_blocks, tiles),
            buffer(out, sizes.elements()),
            sizes.launch(),
            tiles,
            sizes.columns() / t.block,
            epilogue.ending(false),
            t,
        );
    }
    Ok(())
}
