//! Gradients with respect to keys and values. A cube has up to 64 keys of a block, and loops over the queries that selected it, with all heads that share the
//! list.
//!
//! ```text
//! sᵀ = K · q(j)ᵀ    p = exp2(s − lse)    dv += pᵀ · dO(j)    dpᵀ = V · dO(j)ᵀ    ds = p ∘ (dp − delta)    dk += dsᵀ · q(j)
//! ```
//!
//! This is the loop over columns of the `mma` tier's backward kernel, with other steps: 32 or 64 rows of queries, which are adjacent in the block's list, each
//! with its heads. A search over the ascending blocks of tiles finds the block's queries in the list. Empty rows are zeros, with lse and delta 0, and add
//! nothing.
//!
//! A block that very many queries selected has several cubes, each with a part of its list. [`fold`] sums their results in order, so the bits do not depend on
//! which cube ends first.

// Kernels have no `div_ceil`.
#![allow(clippy::manual_div_ceil)]

use cubecl::prelude::*;

use crate::kernels::listed::views::{Input, first_row};
use blocksparse_cubecl::arch::ptx::{pack, unpack};
use blocksparse_cubecl::arch::sm80::*;
use blocksparse_cubecl::mma::backward::store_rows;
use blocksparse_cubecl::mma::backward_loads::operand_places;
use blocksparse_cubecl::mma::gather::*;
use blocksparse_cubecl::mma::product::*;
use blocksparse_cubecl::mma::tile::{NOWHERE, ROW_PAIR, Tile};
use blocksparse_cubecl::shared::addressing::{Four, Slice, batch_of, head_of};

/// Sizes of the lists of queries by blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListShape {
    /// Number of heads that share a list.
    pub rows: usize,
    /// Number of keys of a block.
    pub block: usize,
    /// Number of places of a tile of queries.
    pub tile: usize,
    /// Maximum number of cubes that share a block's list.
    pub parts: usize,
    /// Least number of steps of a part, except for the last one.
    pub least: usize,
}

impl ListShape {
    /// Returns the bytes of a cube's shared memory.
    pub fn shared_bytes(&self, t: &Tile) -> usize {
        t.shared_bytes(true)
    }
}

/// Lists of queries by blocks, in a kernel.
#[derive(CubeType, CubeLaunch)]
pub struct BlockLists {
    /// Query at each place, `[batch, kv_heads, tiles · tile]`, i32, negative for empty places.
    places: Box<[i32]>,
    /// Block of each tile, `[batch, kv_heads, tiles]`, i32, ascending; negative for unused tiles, which come last.
    tile_blocks: Box<[i32]>,
    tiles: u32,
}

/// Destinations of the gradients: contiguous gradients where a block's list has one part; otherwise unscaled f32 `partial`
/// `[parts, batch · kv_heads, seq_kv, head_dim + value_dim]`.
#[derive(CubeType, CubeLaunch)]
pub struct KeyGrads {
    k: Box<[u32]>,
    v: Box<[u32]>,
    partial: Box<[f32]>,
}

/// The queries of a block.
#[derive(CubeType, Clone, Copy)]
pub struct Queries {
    /// Index of their first place.
    first: usize,
    /// Number of places.
    count: u32,
    /// Number of steps of all of them.
    steps: u32,
    /// Number of steps of a part, except for the last one.
    part: u32,
    /// Number of parts.
    pub parts: u32,
}

/// Returns the queries of the block that contains `key`, of list `list`.
#[cube]
pub fn queries_of(
    tile_blocks: &[i32],
    list: u32,
    tiles: u32,
    key: u32,
    #[comptime] shape: ListShape,
    #[comptime] t: Tile,
) -> Queries {
    let block = (key / comptime!(shape.block as u32)) as i32;
    let of_list = (list * tiles) as usize;
    let start = first_tile(tile_blocks, of_list, tiles, block);
    let end = first_tile(tile_blocks, of_list, tiles, block + 1i32);
    let count = (end - start) * comptime!(shape.tile as u32);
    let cols = comptime!(t.cols as u32);
    let steps = (count * comptime!(shape.rows as u32) + cols - 1) / cols;
    let parts = comptime!(shape.parts as u32);
    let part = max(
        (steps + parts - 1) / parts,
        comptime!(shape.least as u32).runtime(),
    );
    Queries {
        first: (of_list + start as usize) * comptime!(shape.tile),
        count,
        steps,
        part,
        parts: (steps + part - 1) / part,
    }
}

/// Computes dK and dV of blocks. `q` `[batch, heads, seq_q, head_dim]` and `grad_out` are contiguous words; `k` and `v` may have any strides of 16 bytes in
/// their outer dimensions; `stats` is as in [`mainloop`](crate::kernels::listed::mainloop::mainloop). With `carry` gradients are accumulated.
#[cube(launch_unchecked)]
pub fn keys(
    q: &[u32],
    k: Input,
    v: Input,
    grad_out: &[u32],
    stats: &[f32],
    slice: Slice,
    seq_q: u32,
    lists: BlockLists,
    mut grads: KeyGrads,
    scale: f32,
    log2_scale: f32,
    #[comptime] shape: ListShape,
    #[comptime] t: Tile,
) {
    let smem: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(shape.shared_bytes(&t) / 4), 128usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let kv_head = head_of(&slice) as u32;
    let batch = batch_of(&slice) as u32;
    let list = batch * slice.heads as u32 + kv_head;
    let parts = comptime!(shape.parts as u32);
    let first_key = CUBE_POS_X / parts * comptime!(t.rows() as u32);
    let queries = queries_of(&lists.tile_blocks, list, lists.tiles, first_key, shape, t);
    let part = CUBE_POS_X % parts;
    let first_step = min(part * queries.part, queries.steps);
    let steps = uniform(min(queries.part, queries.steps - first_step));
    // Number of heads before the list's first, over all batch entries.
    let head = list * comptime!(shape.rows as u32);
    let row = u64::cast_from(head) * u64::cast_from(seq_q);
    let q_pieces = comptime!(t.words(t.head_dim) as u64 / 4);
    let out_pieces = comptime!(t.words(t.value_dim) as u64 / 4);
    let loads = Loads {
        q: address::<u32>(q) + row * q_pieces * 16,
        grad_out: address::<u32>(grad_out) + row * out_pieces * 16,
        stats: address::<f32>(stats) + row * 8,
    };

    if steps > 0u32 {
        if UNIT_POS_X < comptime!(t.rows() as u32) {
            let key = first_key + UNIT_POS_X;
            let exists = key < k.strides.len;
            let position = select(exists, key, comptime!(NOWHERE).runtime());
            shared_store(base + UNIT_POS_X * 4, position);
        }
        let slots = base + comptime!(t.slot_offset() as u32);
        let mut loaded = query_row(&lists.places, &queries, first_step, seq_q, shape, t);
        store_row(slots, 0u32, loaded, t);
        let second = query_row(&lists.places, &queries, first_step + 1, seq_q, shape, t);
        store_row(slots, 1u32, second, t);
        sync_cube();

        let k_at = base + comptime!(t.a1_offset() as u32);
        let v_at = base + comptime!(t.a2_offset() as u32);
        copy_rows(
            first_row(&k, batch, kv_head),
            k.strides.row,
            base,
            k_at,
            comptime!(t.rows()),
            comptime!(t.head_dim),
            t,
        );
        copy_rows(
            first_row(&v, batch, kv_head),
            v.strides.row,
            base,
            v_at,
            comptime!(t.rows()),
            comptime!(t.value_dim),
            t,
        );
        copy_step(&loads, base, 0u32, loaded, t);
        loaded = second;

        let warp_rows = warp * 16;
        let first_row = warp_rows + lane / 4;
        let quad = lane % 4 * 2;
        // Operands of k, v, and of q and dO in both orders.
        let operands = operand_places(base, warp_rows, lane, t);

        let mut dk = Array::<Vector<f32, Four>>::new(comptime!(t.head_dim / 8));
        let mut dv = Array::<Vector<f32, Four>>::new(comptime!(t.value_dim / 8));
        #[unroll]
        for i in 0..comptime!(t.head_dim / 8) {
            dk[i] = Vector::<f32, Four>::zeroed();
        }
        #[unroll]
        for i in 0..comptime!(t.value_dim / 8) {
            dv[i] = Vector::<f32, Four>::zeroed();
        }
        let none = Array::<Vector<u32, Four>>::new(1usize);
        for j in 0..steps {
            let stage = j & 1;
            wait_copies();
            sync_cube();
            copy_step(&loads, base, j + 1, loaded, t);
            let found = query_row(&lists.places, &queries, first_step + j + 2, seq_q, shape, t);
            loaded = found;

            let q_stage = stage * comptime!(t.b1_bytes() as u32);
            let out_stage = stage * comptime!(t.b2_bytes() as u32);
            let stats_stage = operands.stats + stage * comptime!(t.stats_bytes() as u32);
            let mut s = product(
                operands.a1_rows,
                &none,
                operands.b1_cols + q_stage,
                false,
                comptime!(t.head_dim),
                t,
            );
            weigh(&mut s, stats_stage, log2_scale, t);
            let p = pack_left(&s, t);
            accumulate(
                &p,
                operands.b2_rows + out_stage,
                &mut dv,
                comptime!(t.value_dim),
                t,
            );
            let mut dp = product(
                operands.a2_rows,
                &none,
                operands.b2_cols + out_stage,
                false,
                comptime!(t.value_dim),
                t,
            );
            by_scores(&s, &mut dp, stats_stage, t);
            let ds = pack_left(&dp, t);
            accumulate(
                &ds,
                operands.b1_rows + q_stage,
                &mut dk,
                comptime!(t.head_dim),
                t,
            );
            store_row(slots, j + 2, found, t);
        }

        let first = list * k.strides.len;
        if queries.parts == 1u32 {
            store_rows(
                &mut grads.k,
                &dk,
                0u32,
                first,
                base,
                first_row,
                quad,
                scale,
                comptime!(t.head_dim),
                t,
            );
            store_rows(
                &mut grads.v,
                &dv,
                0u32,
                first,
                base,
                first_row,
                quad,
                f32::new(1.0),
                comptime!(t.value_dim),
                t,
            );
        } else {
            let keys = part * (list_count(&slice) * k.strides.len) + first;
            store_part(
                &mut grads.partial,
                &dk,
                keys,
                base,
                first_row,
                quad,
                0usize,
                comptime!(t.head_dim),
                t,
            );
            store_part(
                &mut grads.partial,
                &dv,
                keys,
                base,
                first_row,
                quad,
                comptime!(t.head_dim),
                comptime!(t.value_dim),
                t,
            );
        }
    }
}

/// Converts scores to weights. `stats` is the address of the columns' lse and delta in shared memory.
#[cube]
pub fn weigh(s: &mut Array<Vector<f32, Four>>, stats: u32, log2_scale: f32, #[comptime] t: Tile) {
    #[unroll]
    for n in 0..comptime!(t.eights()) {
        let stats = shared_load_four(stats + comptime!(n as u32 * 64));
        let mut four = s[n];
        #[unroll]
        for i in 0..4usize {
            let log = stats.extract(comptime!(i % 2 * 2));
            four.insert(i, exp2(multiply_add(four.extract(i), log2_scale, -log)));
        }
        s[n] = four;
    }
}

/// Converts gradients with respect to weights to those with respect to scores.
#[cube]
pub fn by_scores(
    p: &Array<Vector<f32, Four>>,
    dp: &mut Array<Vector<f32, Four>>,
    stats: u32,
    #[comptime] t: Tile,
) {
    #[unroll]
    for n in 0..comptime!(t.eights()) {
        let stats = shared_load_four(stats + comptime!(n as u32 * 64));
        let weights = p[n];
        let mut four = dp[n];
        #[unroll]
        for i in 0..4usize {
            let delta = stats.extract(comptime!(i % 2 * 2 + 1));
            four.insert(i, weights.extract(i) * (four.extract(i) - delta));
        }
        dp[n] = four;
    }
}

/// Returns the number of lists over all batch entries.
#[cube]
pub fn list_count(slice: &Slice) -> u32 {
    (slice.batches * slice.heads) as u32
}

/// Writes the unit's rows of a part, from element `column` of a row on. `first` is the number of keys before those of the head.
#[cube]
fn store_part(
    partial: &mut [f32],
    acc: &Array<Vector<f32, Four>>,
    first: u32,
    positions: u32,
    first_row: u32,
    quad: u32,
    #[comptime] column: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    #[unroll]
    for i in 0..2usize {
        let position = shared_load(positions + (first_row + comptime!(i as u32 * ROW_PAIR)) * 4);
        if position != comptime!(NOWHERE) {
            let row = (first + position) as usize * comptime!(t.head_dim + t.value_dim);
            let at = row + comptime!(column) + quad as usize;
            #[unroll]
            for n in 0..comptime!(dim / 8) {
                partial[at + comptime!(8 * n)] = acc[n].extract(comptime!(2 * i));
                partial[at + comptime!(8 * n + 1)] = acc[n].extract(comptime!(2 * i + 1));
            }
        }
    }
}

/// Addresses of the rows of a list.
#[derive(CubeType, Clone, Copy)]
struct Loads {
    q: u64,
    grad_out: u64,
    stats: u64,
}

/// Finds a list's first tile whose block is not before `block`. The lanes of a warp search together: each round leaves 1/32 of the tiles.
#[cube]
fn first_tile(tile_blocks: &[i32], of_list: usize, tiles: u32, block: i32) -> u32 {
    let lane = UNIT_POS_X % 32;
    let mut low = 0u32;
    let mut size = tiles;
    while size > 0u32 {
        let step = (size + 31) / 32;
        let offset = lane * step;
        let mut is_before = 0u32;
        if offset < size {
            let its = tile_blocks[of_list + (low + offset) as usize];
            if its >= 0i32 && its < block {
                is_before = 1u32;
            }
        }
        // Blocks are ascending, so smaller ones come first.
        let before = lanes_that_differ(is_before, 0u32).count_ones();
        if before == 0u32 {
            size = 0u32;
        } else {
            let behind = (before - 1) * step + 1;
            low += behind;
            size = min(step - 1, size - behind);
        }
    }
    low
}

/// Returns the row of the unit's column of step `j`, over the list's heads, or [`NOWHERE`].
#[cube]
fn query_row(
    places: &[i32],
    queries: &Queries,
    j: u32,
    seq_q: u32,
    #[comptime] shape: ListShape,
    #[comptime] t: Tile,
) -> u32 {
    let mut row = comptime!(NOWHERE).runtime();
    if UNIT_POS_X < comptime!(t.cols as u32) {
        let flat = j * comptime!(t.cols as u32) + UNIT_POS_X;
        let entry = flat / comptime!(shape.rows as u32);
        if entry < queries.count {
            let query = places[queries.first + entry as usize];
            if query >= 0i32 {
                row = flat % comptime!(shape.rows as u32) * seq_q + query as u32;
            }
        }
    }
    row
}

/// Writes the row of the unit's column of step `j` to its slot.
#[cube]
fn store_row(slots: u32, j: u32, row: u32, #[comptime] t: Tile) {
    if UNIT_POS_X < comptime!(t.cols as u32) {
        shared_store(slots + slot_of(j, t) + UNIT_POS_X * 4, row);
    }
}

/// Starts to copy the rows of step `j` with their lse and delta. `row` is that of the unit's column.
#[cube]
fn copy_step(loads: &Loads, base: u32, j: u32, row: u32, #[comptime] t: Tile) {
    let stage = j & 1;
    let slot = base + comptime!(t.slot_offset() as u32) + slot_of(j, t);
    let q_pieces = comptime!(t.words(t.head_dim) as u64 / 4);
    let out_pieces = comptime!(t.words(t.value_dim) as u64 / 4);
    copy_rows(
        loads.q,
        q_pieces.runtime(),
        slot,
        base + comptime!(t.b1_offset(true) as u32) + stage * comptime!(t.b1_bytes() as u32),
        comptime!(t.cols),
        comptime!(t.head_dim),
        t,
    );
    copy_rows(
        loads.grad_out,
        out_pieces.runtime(),
        slot,
        base + comptime!(t.b2_offset(true) as u32) + stage * comptime!(t.b2_bytes() as u32),
        comptime!(t.cols),
        comptime!(t.value_dim),
        t,
    );
    if UNIT_POS_X < comptime!(t.cols as u32) {
        let exists = row != comptime!(NOWHERE);
        copy_pair(
            base + comptime!(t.stats_at(0) as u32)
                + stage * comptime!(t.stats_bytes() as u32)
                + UNIT_POS_X * 8,
            loads.stats + u64::cast_from(select(exists, row, 0u32)) * 8,
            select(exists, 8u32, 0u32),
        );
    }
}

/// Adds the parts of a cube's keys to their gradients, in order. Arguments are as in [`keys`](crate::kernels::listed::keys::keys).
#[cube(launch_unchecked)]
pub fn fold(
    partial: &[f32],
    tile_blocks: &[i32],
    grad_k: &mut [u32],
    grad_v: &mut [u32],
    slice: Slice,
    seq_kv: u32,
    tiles: u32,
    scale: f32,
    #[comptime] shape: ListShape,
    #[comptime] t: Tile,
) {
    let list = (batch_of(&slice) * slice.heads + head_of(&slice)) as u32;
    let first_key = CUBE_POS_X * comptime!(t.rows() as u32);
    let parts = queries_of(tile_blocks, list, tiles, first_key, shape, t).parts;
    if parts > 1u32 {
        let between = list_count(&slice) * seq_kv;
        let first = list * seq_kv + first_key;
        let rows = min(comptime!(t.rows() as u32).runtime(), seq_kv - first_key);
        add(
            partial,
            grad_k,
            first,
            between,
            rows,
            parts,
            scale,
            0usize,
            comptime!(t.head_dim),
            t,
        );
        add(
            partial,
            grad_v,
            first,
            between,
            rows,
            parts,
            f32::new(1.0),
            comptime!(t.head_dim),
            comptime!(t.value_dim),
            t,
        );
    }
}

/// Adds the parts of rows from element `column` on, times a factor; `between` rows lie between parts.
#[cube]
fn add(
    partial: &[f32],
    grad: &mut [u32],
    first: u32,
    between: u32,
    rows: u32,
    parts: u32,
    factor: f32,
    #[comptime] column: usize,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    let half = comptime!(t.element.half());
    let words = comptime!(dim as u32 / 2);
    let mut index = UNIT_POS_X;
    while index < rows * words {
        let row = first + index / words;
        let number = index % words * 2;
        let mut low = f32::new(0.0);
        let mut high = f32::new(0.0);
        for part in 0..parts {
            let at = (part * between + row) as usize * comptime!(t.head_dim + t.value_dim)
                + comptime!(column)
                + number as usize;
            low += partial[at];
            high += partial[at + 1];
        }
        let at = (row * words + index % words) as usize;
        let there = grad[at];
        grad[at] = pack(
            low * factor + unpack(there, false, half),
            high * factor + unpack(there, true, half),
            half,
        );
        index += comptime!(t.units() as u32);
    }
}
