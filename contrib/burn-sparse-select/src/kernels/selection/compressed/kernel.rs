//! The kernel: a warp has all heads of some queries, and iterates over the compressed blocks that they see.
//!
//! ```text
//! s = q · kᵀ           wgmma or mma.sync; 16 rows are the heads of one, two or four queries and stay in registers
//! p = exp2(s − lse)    0 where a query does not see a compressed block
//! sums over heads      8 lanes exchange halves of their columns; each ends with the sums of some columns
//! sums over overlaps   over this step and the one before, in the warp's own shared memory
//! top-k                lane i holds the i-th highest block of a query; blocks above the last one are inserted
//! ```
//!
//! Keys are copied one step ahead. Warps synchronize once per step, after they have read the keys of the step before.

// Compile-time conditions stay separate from runtime ones; kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use crate::kernels::selection::compressed::asm::async_fence;
use crate::kernels::selection::compressed::chosen::{insert_all, nothing_chosen};
use crate::kernels::selection::compressed::steps::{
    copy_keys, group_products, overlapping, products, sum_heads, weigh,
};
use crate::kernels::selection::compressed::tile::{
    AttentionSumTile, CompressedPlan, CompressedShape, MOST, STEP,
};
use crate::kernels::selection::compressed::{CompressedInputs, Wanted};
use blocksparse_cubecl::arch::ptx::{shared_address, shared_store, uniform};
use blocksparse_cubecl::arch::sm80::{address, bits_of, wait_copies};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::addressing::Four;
use blocksparse_cubecl::shared::order_key::key;
use blocksparse_cubecl::tensor::check_rows;

/// Sizes of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Number of KV heads, and of query heads per KV head.
    kv_heads: u32,
    group: u32,
    /// Number of queries of this launch, the first one, and the number of all queries.
    rows: u32,
    first_row: u32,
    seq_q: u32,
    /// Position of query 0.
    behind: u32,
    /// Number of compressed blocks.
    entries: u32,
    /// Tokens of a compressed block, tokens from one to the next, and tokens of a block to select from.
    block: u32,
    stride: u32,
    selected: u32,
    /// Number of blocks to select from.
    blocks: u32,
    /// Number of forced blocks at the start, and up to the query's own; number of selected blocks.
    first: u32,
    local: u32,
    most: u32,
    /// Number of cubes of a list, and of all.
    row_cubes: u32,
    cubes: u32,
    /// Words between batch entries, heads and queries.
    q_batch: usize,
    q_head: usize,
    q_row: usize,
}

/// Launches the kernel, which writes attention sums or the blocks selected by them.
///
/// # Errors
/// [`KernelError`] if a tensor's layout is not supported, or it is too large, or if more blocks are selected than the plan serves.
pub fn compressed_attention_sums(
    client: &Client,
    plan: &CompressedPlan,
    inputs: &CompressedInputs,
    scale: f64,
    wanted: &Wanted,
    out: &Handle,
) -> Result<(), KernelError> {
    let CompressedShape {
        batch,
        heads: [heads, kv_heads],
        seq: [seq_q, seq_kv],
        width,
        blocks: [block, stride, selected],
    } = plan.shape;
    check_rows("q", &inputs.q, 8)?;
    let begins = inputs.k.offset_start.unwrap_or(0) as usize;
    if !begins.is_multiple_of(16) {
        return Err(KernelError::Alignment {
            tensor: "k",
            multiple: 8,
            got: begins / 2,
        });
    }
    let (rows, forced, most) = match wanted {
        Wanted::AttentionSums(rows) => {
            (rows.clone(), blocksparse::Always { first: 0, local: 1 }, 0)
        }
        Wanted::Choice { forced, most } => (0..seq_q, *forced, *most),
    };
    let chooses = matches!(wanted, Wanted::Choice { .. });
    if most > MOST {
        let what = "blocks that a query chooses";
        return Err(KernelError::limit(what, MOST as u32, most));
    }
    let shape = &plan.shape;
    let (lists, entries, blocks) = (shape.lists(), shape.entries(), shape.chosen_from());
    let columns = if chooses { most } else { blocks };
    if lists * rows.len() * columns == 0 {
        return Ok(());
    }
    let tile = plan.tile.choosing(chooses);
    let [low, high, sums] = tile.vectors();
    let [_, of_cube] = tile.queries();
    let row_cubes = rows.len().div_ceil(of_cube);
    let cubes = lists * row_cubes;
    let q_words = inputs.q.reach().div_ceil(2);
    let lse_len = batch * heads * seq_q;
    let out_len = lists * rows.len() * columns;
    let largest = q_words.max(lse_len).max(out_len);
    let positions = [seq_kv + STEP * stride, cubes, lists * entries * width / 8];
    for number in positions {
        KernelError::check_u32("the sizes of compressed blocks", number)?;
    }
    let [q_batch, q_head, q_row, _] = inputs.q.strides;
    let sizes = SizesLaunch::new(
        kv_heads as u32,
        (heads / kv_heads) as u32,
        rows.len() as u32,
        rows.start as u32,
        seq_q as u32,
        (seq_kv - seq_q) as u32,
        entries as u32,
        block as u32,
        stride as u32,
        selected as u32,
        blocks as u32,
        u32::try_from(forced.first)
            .unwrap_or(u32::MAX / 2)
            .min(u32::MAX / 2),
        u32::try_from(forced.local)
            .unwrap_or(u32::MAX / 2)
            .min(u32::MAX / 2),
        most as u32,
        row_cubes as u32,
        cubes as u32,
        q_batch / 2,
        q_head / 2,
        q_row / 2,
    );
    // SAFETY: a cube below `cubes` reads queries and lse of existing rows (surplus rows repeat the last one), keys below `entries`, and writes existing rows
    // and columns of `out`. Shared memory has the size of the tile, and accesses stay within its parts.
    unsafe {
        attention_sums::launch_unchecked(
            client,
            spread(client, cubes as u64)?,
            CubeDim::new_1d(tile.units() as u32),
            address_of(client, largest)?,
            low,
            high,
            sums,
            buffer(&inputs.q.handle, q_words),
            buffer(&inputs.k, lists * entries * width / 2),
            buffer(&inputs.lse, lse_len),
            buffer(out, out_len),
            sizes,
            (scale * std::f64::consts::LOG2_E) as f32,
            tile,
        );
    }
    Ok(())
}

/// Computes attention sums, or selects blocks by them. `q` may have any strides in its outer dimensions that are multiples of 16 bytes; `k` is contiguous
/// `[batch, kv_heads, entries, width]`; both are words. `lse` is `[batch, heads, seq_q]`. `out` holds the bits of f32 attention sums
/// `[batch, kv_heads, rows, blocks]`, or of i32 blocks `[batch, kv_heads, rows, most]`. `factor` scales products to base-2 logits.
#[cube(launch_unchecked, address_type = "dynamic")]
fn attention_sums<P: Size, R: Size, S: Size>(
    q: &[u32],
    k: &[u32],
    lse: &[f32],
    out: &mut [u32],
    of: Sizes,
    factor: f32,
    #[comptime] tile: AttentionSumTile,
) {
    let tiles = comptime!(tile.tiles);
    let depth = comptime!(tile.depth());
    let queries = comptime!(tile.queries()[0]);
    let per = comptime!(tile.blocks());
    let smem: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(tile.shared_bytes() / 4), 1024usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let across = lane / 4;
    let along = lane % 4;
    let cube = CUBE_POS as u32;
    if cube < of.cubes {
        let list = cube / of.row_cubes;
        // The last queries see most, so their cubes start first, which balances the tail.
        let cube_row =
            (of.row_cubes - 1 - cube % of.row_cubes) * comptime!(tile.queries()[1] as u32);
        let warp_row = cube_row + warp * comptime!(queries as u32);
        let batch = list / of.kv_heads;
        let kv_head = list % of.kv_heads;

        // For rows `across` and `across + 8` of each tile: the shift of base-2 logits, the number of visible compressed blocks, and the offset of the lane's
        // words.
        let mut shift = Array::<f32>::new(comptime!(2 * tiles));
        let mut seen = Array::<u32>::new(comptime!(2 * tiles));
        let mut starts = Array::<usize>::new(comptime!(2 * tiles));
        #[unroll]
        for i in 0..comptime!(2 * tiles) {
            let row = across + comptime!((i * 8) as u32);
            let query = warp_row + row / comptime!(tile.members as u32);
            let query = min(query, of.rows - 1) + of.first_row;
            let member = row % comptime!(tile.members as u32);
            let head = kv_head * of.group + min(member, of.group - 1);
            let of_heads = (batch * of.kv_heads * of.group + head) as usize;
            let log = lse[of_heads * of.seq_q as usize + query as usize];
            // Padding rows, and rows that see nothing, have weights of 0.
            let counts = member < of.group && log > f32::new(f32::NEG_INFINITY);
            let negative = log * comptime!(-std::f32::consts::LOG2_E);
            shift[i] = select(counts, negative, f32::new(f32::NEG_INFINITY));
            let end = query + of.behind + 1;
            let behind = end - min(end, of.block);
            seen[i] = select(end >= of.block, behind / of.stride + 1, 0u32);
            starts[i] = batch as usize * of.q_batch
                + head as usize * of.q_head
                + query as usize * of.q_row
                + along as usize;
        }
        let mut left = Array::<Vector<u32, Four>>::new(comptime!(tiles * depth));
        #[unroll]
        for m in 0..tiles {
            #[unroll]
            for n in 0..depth {
                let mut four = Vector::<u32, Four>::zeroed();
                #[unroll]
                for i in 0..4usize {
                    let word = comptime!(8 * n + i / 2 * 4);
                    four.insert(i, q[starts[comptime!(2 * m + i % 2)] + word]);
                }
                left[comptime!(m * depth + n)] = four;
            }
        }

        // Operands of wgmma are single vectors.
        let mut low = Vector::<u32, P>::zeroed();
        let mut high = Vector::<u32, R>::zeroed();
        if comptime!(tile.is_wgmma) {
            let (first, words) = comptime!((tile.vectors()[0], 4 * depth));
            #[unroll]
            for i in 0..words {
                let word = left[comptime!(i / 4)].extract(comptime!(i % 4));
                if comptime!(i < first) {
                    low.insert(i, word);
                } else {
                    high.insert(comptime!(i - first), word);
                }
            }
        }

        // Blocks up to the last one that matters for any of the cube's queries.
        let last = min(cube_row + comptime!(tile.queries()[1] as u32), of.rows) - 1
            + of.first_row
            + of.behind;
        let own = last / of.selected + 1;
        let mut wanted = own;
        if comptime!(tile.chooses) {
            wanted = own - min(own, of.local);
        }
        let steps = uniform((wanted + comptime!(per as u32 - 1)) / comptime!(per as u32));

        let sums = base
            + comptime!(tile.sums_offset() as u32)
            + warp * comptime!((queries * tile.sums_pitch()) as u32);
        // No compressed block precedes the first step.
        #[unroll]
        for i in 0..comptime!(2 * queries) {
            let place = comptime!((i / 2 * tile.sums_pitch() + STEP * 4 + i % 2 * 128) as u32);
            shared_store(sums + place + lane * 4, 0u32);
        }
        let mut chosen = nothing_chosen(queries);

        let keys = address::<u32>(k)
            + u64::cast_from(list)
                * u64::cast_from(of.entries)
                * comptime!((tile.width * 2) as u64);
        copy_keys(keys, base, 0u32, of.entries, tile);
        let mut own_keys = base;
        if comptime!(!tile.is_wgmma) {
            own_keys +=
                (lane % 8 + lane / 16 * 8) * comptime!(tile.pitch() as u32) + lane / 8 % 2 * 16;
        }
        let chunks = comptime!((STEP / tile.chunk()) as u32);
        for chunk in 0..steps * chunks {
            let j = chunk / chunks;
            let part = chunk % chunks;
            let stage = j & 1;
            if part == 0 {
                wait_copies();
                if comptime!(tile.is_wgmma) {
                    async_fence();
                }
                sync_cube();
                if j + 1 < steps {
                    let target = base + (1 - stage) * comptime!(tile.step_bytes() as u32);
                    copy_keys(
                        keys,
                        target,
                        (j + 1) * comptime!(STEP as u32),
                        of.entries,
                        tile,
                    );
                }
            }
            let from = own_keys + stage * comptime!(tile.step_bytes() as u32);
            let mut p = if comptime!(tile.is_wgmma) {
                group_products::<P, R, S>(low, high, from, tile)
            } else {
                let from = from + part * comptime!((tile.chunk() * tile.pitch()) as u32);
                products(&left, from, tile)
            };
            weigh(&mut p, &shift, &seen, factor, chunk, along, tile);
            let ring =
                stage * comptime!((STEP * 4) as u32) + part * comptime!((tile.chunk() * 4) as u32);
            sum_heads(&p, sums + ring, across, along, lane, tile);
            if part == comptime!((STEP / tile.chunk()) as u32 - 1) {
                sync_plane();
                #[unroll]
                for i in 0..comptime!((queries * per).div_ceil(32)) {
                    let item = comptime!((i * 32) as u32) + lane;
                    let query = item / comptime!(per as u32);
                    let within = item % comptime!(per as u32);
                    // Units without a query repeat the last one's.
                    let place = min(query, comptime!(queries as u32 - 1));
                    let attention_sum = overlapping(
                        sums + place * comptime!(tile.sums_pitch() as u32),
                        stage * comptime!(STEP as u32) + within * comptime!(tile.strides as u32),
                        tile,
                    );
                    let block = j * comptime!(per as u32) + within;
                    let row = warp_row + query;
                    let exists = query < comptime!(queries as u32) && row < of.rows;
                    if comptime!(tile.chooses) {
                        let own = (row + of.first_row + of.behind) / of.selected;
                        let is_free = exists && block >= of.first && block + of.local <= own;
                        let its = select(is_free, key(bits_of(attention_sum)), 0u32);
                        #[unroll]
                        for n in 0..comptime!((32 / per).clamp(1, queries)) {
                            let query = comptime!(i * 32 / per + n);
                            if comptime!(query < queries) {
                                let lanes = comptime!(if per >= 32 {
                                    u32::MAX
                                } else {
                                    ((1u32 << per) - 1) << (n * per)
                                });
                                insert_all(&mut chosen, its, block, lanes, of.most, query);
                            }
                        }
                    } else if exists && block < of.blocks {
                        let at =
                            (list * of.rows + row) as usize * of.blocks as usize + block as usize;
                        out[at] = bits_of(attention_sum);
                    }
                }
            }
        }
        // A copy may still be in flight.
        wait_copies();

        if comptime!(tile.chooses) {
            #[unroll]
            for query in 0..queries {
                let row = warp_row + comptime!(query as u32);
                if row < of.rows && lane < of.most {
                    out[(list * of.rows + row) as usize * of.most as usize + lane as usize] =
                        chosen.blocks[query];
                }
            }
        } else {
            #[unroll]
            for query in 0..queries {
                let row = warp_row + comptime!(query as u32);
                if row < of.rows {
                    let mut block = steps * comptime!(per as u32) + lane;
                    while block < of.blocks {
                        let at =
                            (list * of.rows + row) as usize * of.blocks as usize + block as usize;
                        out[at] = 0u32;
                        block += 32;
                    }
                }
            }
        }
    }
}
