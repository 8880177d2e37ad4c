//! The kernel: a warp has all heads of some queries, and goes through the compressed blocks that they see.
//!
//! ```text
//! s = q · kᵀ                 mma.sync: 16 rows are the heads of a query, of two or of four; queries stay in registers
//! p = exp2(s − lse)          0 where a query does not see a compressed block
//! sums over heads            8 lanes trade halves of what they have, so that each ends with some sums
//! sums over what overlaps    of this step and the one before, in shared memory of the warp's own
//! the highest few            a lane has the i-th highest of a query; what is above the last is inserted
//! ```
//!
//! Keys are copied a step ahead. Warps meet once a step, when they have read the keys before.

// What is known at compile time stays apart from what is not; kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::asm::*;
use super::tile::{CompressedPlan, CompressedShape, MOST, MassTile, ROWS, STEP};
use super::{CompressedInputs, Wanted};
use crate::kernels::args::{address_of, buffer, spread};
use crate::kernels::error::KernelError;
use crate::kernels::mma::asm::{
    Element, address, bits_of, copy_piece, load_matrices, multiply, of_bits, wait_copies,
};
use crate::kernels::on_device::keep::key;
use crate::kernels::shared::asm::{
    exp2, multiply_add, shared_address, shared_load, shared_store, shuffle_xor, uniform,
};
use crate::kernels::shared::walk::Four;
use crate::kernels::tensor::check_rows;

/// Stands for a key that there is not.
const NOWHERE: u32 = u32::MAX;

/// Compressed blocks that have sums in registers at a time: half a step, so that a multiprocessor has more warps.
const CHUNK: usize = STEP / 2;

/// Eights of them.
const EIGHTS: usize = CHUNK / 8;

/// Sizes of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// Heads of keys, and of queries that share one.
    kv_heads: u32,
    group: u32,
    /// Queries of a list here, the first of them, and all.
    rows: u32,
    first_row: u32,
    seq_q: u32,
    /// The position of the first of all.
    behind: u32,
    /// Compressed blocks.
    entries: u32,
    /// Their tokens, from one to the next, and tokens of a block to choose from.
    block: u32,
    stride: u32,
    selected: u32,
    /// Blocks to choose from.
    blocks: u32,
    /// Forced ones, the first and up to the own, and how many are chosen.
    first: u32,
    local: u32,
    most: u32,
    /// Cubes of a list, and all.
    row_cubes: u32,
    cubes: u32,
    /// Words between batch entries, heads and queries.
    q_batch: usize,
    q_head: usize,
    q_row: usize,
}

pub fn launch(
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
    check_rows("q", &inputs.q, 2)?;
    let begins = inputs.k.offset_start.unwrap_or(0) as usize;
    if !begins.is_multiple_of(16) {
        return Err(KernelError::Alignment {
            tensor: "k",
            multiple: 8,
            got: begins / 2,
        });
    }
    let (rows, forced, most) = match wanted {
        Wanted::Masses(rows) => (rows.clone(), crate::Forced { first: 0, local: 1 }, 0),
        Wanted::Choice { forced, most } => (0..seq_q, *forced, *most),
    };
    let chooses = matches!(wanted, Wanted::Choice { .. });
    if most > MOST {
        return Err(KernelError::limit(
            "blocks that a query chooses",
            MOST as u32,
            most,
        ));
    }
    let shape = &plan.shape;
    let (lists, entries, blocks) = (shape.lists(), shape.entries(), shape.chosen_from());
    let columns = if chooses { most } else { blocks };
    if lists * rows.len() * columns == 0 {
        return Ok(());
    }
    let tile = plan.tile.choosing(chooses);
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
    // SAFETY: a cube below `cubes` reads queries and lse of rows that there are (others are the last one once more), keys below `entries`, and writes rows and
    // columns of `out` that there are. Shared memory is as large as the tile says, and read and written within its parts.
    unsafe {
        masses::launch_unchecked(
            client,
            spread(client, cubes as u64)?,
            CubeDim::new_1d(tile.units() as u32),
            address_of(client, largest)?,
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

/// `q` with any strides of 4 bytes in its outer dimensions and `k` `[batch, kv_heads, entries, width]` contiguous, in words; `lse` `[batch, heads, seq_q]`; `out` are
/// the bits of f32 masses `[batch, kv_heads, rows, blocks]`, or of i32 blocks `[batch, kv_heads, rows, most]`. `factor` makes powers of two of products.
#[cube(launch_unchecked, address_type = "dynamic")]
fn masses(
    q: &[u32],
    k: &[u32],
    lse: &[f32],
    out: &mut [u32],
    of: Sizes,
    factor: f32,
    #[comptime] tile: MassTile,
) {
    let tiles = comptime!(tile.tiles);
    let depth = comptime!(tile.depth());
    let queries = comptime!(tile.queries()[0]);
    let per = comptime!(tile.blocks());
    let smem: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(tile.shared_bytes() / 4), 128usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let across = lane / 4;
    let along = lane % 4;
    let cube = CUBE_POS as u32;
    if cube < of.cubes {
        let list = cube / of.row_cubes;
        // The last queries see most: theirs come first, so that what is left at the end is little.
        let cube_row =
            (of.row_cubes - 1 - cube % of.row_cubes) * comptime!(tile.queries()[1] as u32);
        let warp_row = cube_row + warp * comptime!(queries as u32);
        let batch = list / of.kv_heads;
        let kv_head = list % of.kv_heads;

        // Of rows `across` and `across + 8` of each tile: what is added to powers, how many compressed blocks are seen, and where the lane's words begin.
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
            // Rows that fill up, and those that see nothing, have no weights.
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

        // Blocks up to the last that counts for any of the cube's queries.
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
        // Nothing comes before the first step.
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
        let lane_keys =
            base + (lane % 8 + lane / 16 * 8) * comptime!(tile.pitch() as u32) + lane / 8 % 2 * 16;
        for chunk in 0..2 * steps {
            let j = chunk / 2;
            let stage = j & 1;
            let half = chunk & 1;
            if half == 0 {
                wait_copies();
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
            let from = lane_keys
                + stage * comptime!(tile.step_bytes() as u32)
                + half * comptime!((CHUNK * tile.pitch()) as u32);
            let mut p = products(&left, from, tile);
            weigh(&mut p, &shift, &seen, factor, chunk, along, tile);
            let ring = (chunk & 3) * comptime!((CHUNK * 4) as u32);
            sum_heads(&p, sums + ring, across, along, lane, tile);
            if half == 1 {
                sync_plane();
                #[unroll]
                for i in 0..comptime!((queries * per).div_ceil(32)) {
                    let item = comptime!((i * 32) as u32) + lane;
                    let query = item / comptime!(per as u32);
                    let within = item % comptime!(per as u32);
                    // Units without a query have the last one's.
                    let place = min(query, comptime!(queries as u32 - 1));
                    let mass = overlapping(
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
                        let its = select(is_free, key(bits_of(mass)), 0u32);
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
                        out[at] = bits_of(mass);
                    }
                }
            }
        }
        // A copy may be under way.
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

/// Starts to copy the keys of a step from entry `first` on; behind the last one there are zeros.
#[cube]
fn copy_keys(keys: u64, target: u32, first: u32, entries: u32, #[comptime] tile: MassTile) {
    let pieces = comptime!((tile.width / 8) as u32);
    #[unroll]
    for i in 0..comptime!(STEP * tile.width / 8 / tile.units()) {
        let at = UNIT_POS_X + comptime!((i * tile.units()) as u32);
        let (row, piece) = (at / pieces, at % pieces);
        let entry = first + row;
        let place = select(entry < entries, entry, comptime!(NOWHERE));
        copy_piece(
            target + row * comptime!(tile.pitch() as u32) + piece * 16,
            keys + u64::cast_from(piece * 16),
            place,
            comptime!((tile.width * 2) as u32).runtime(),
        );
    }
}

/// Products of the warp's rows and the keys of half a step.
#[cube]
fn products(
    left: &Array<Vector<u32, Four>>,
    keys: u32,
    #[comptime] tile: MassTile,
) -> Array<Vector<f32, Four>> {
    let tiles = comptime!(tile.tiles);
    let depth = comptime!(tile.depth());
    let mut s = Array::<Vector<f32, Four>>::new(comptime!(tiles * EIGHTS));
    #[unroll]
    for i in 0..comptime!(tiles * EIGHTS) {
        s[i] = Vector::<f32, Four>::zeroed();
    }
    #[unroll]
    for n in 0..depth {
        #[unroll]
        for pair in 0..comptime!(EIGHTS / 2) {
            let right = load_matrices(keys, comptime!(pair * 16 * tile.pitch() + n * 32));
            #[unroll]
            for m in 0..tiles {
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(m * EIGHTS + 2 * pair + half);
                    s[at] = multiply(
                        left[comptime!(m * depth + n)],
                        right.extract(comptime!(2 * half)),
                        right.extract(comptime!(2 * half + 1)),
                        s[at],
                        comptime!(Element::Half(tile.half())),
                    );
                }
            }
        }
    }
    s
}

/// Products to weights.
#[cube]
fn weigh(
    p: &mut Array<Vector<f32, Four>>,
    shift: &Array<f32>,
    seen: &Array<u32>,
    factor: f32,
    chunk: u32,
    along: u32,
    #[comptime] tile: MassTile,
) {
    #[unroll]
    for m in 0..comptime!(tile.tiles) {
        #[unroll]
        for n in 0..EIGHTS {
            let mut four = p[comptime!(m * EIGHTS + n)];
            #[unroll]
            for i in 0..4usize {
                let power = multiply_add(four.extract(i), factor, shift[comptime!(2 * m + i / 2)]);
                four.insert(i, exp2(power));
            }
            p[comptime!(m * EIGHTS + n)] = four;
        }
    }
    // Rows of later queries see no less.
    if (chunk + 1) * comptime!(CHUNK as u32) > uniform(seen[0]) {
        #[unroll]
        for m in 0..comptime!(tile.tiles) {
            #[unroll]
            for n in 0..EIGHTS {
                let mut four = p[comptime!(m * EIGHTS + n)];
                #[unroll]
                for i in 0..4usize {
                    let entry = chunk * comptime!(CHUNK as u32)
                        + comptime!((n * 8 + i % 2) as u32)
                        + 2 * along;
                    let is_seen = entry < seen[comptime!(2 * m + i / 2)];
                    four.insert(i, select(is_seen, four.extract(i), 0.0f32));
                }
                p[comptime!(m * EIGHTS + n)] = four;
            }
        }
    }
}

/// Sums over the heads of each query, to shared memory.
///
/// A query's rows are `members` neighbours. Lanes whose rows are of one query trade halves of their eights of columns until each has its own.
#[cube]
fn sum_heads(
    p: &Array<Vector<f32, Four>>,
    sums: u32,
    across: u32,
    along: u32,
    lane: u32,
    #[comptime] tile: MassTile,
) {
    // Where rows `across` and `across + 8` are of one query, they are added first.
    let halves = comptime!(if tile.members == ROWS { 1usize } else { 2usize });
    let lanes = comptime!(tile.members.min(8));
    let kept = comptime!(2 * EIGHTS / lanes);
    #[unroll]
    for m in 0..comptime!(tile.tiles) {
        #[unroll]
        for half in 0..halves {
            let mut own = Array::<f32>::new(comptime!(2 * EIGHTS));
            #[unroll]
            for n in 0..EIGHTS {
                let four = p[comptime!(m * EIGHTS + n)];
                #[unroll]
                for c in 0..2usize {
                    let mut sum = four.extract(comptime!(2 * half + c));
                    if comptime!(halves == 1) {
                        sum += four.extract(comptime!(2 + c));
                    }
                    own[comptime!(2 * n + c)] = sum;
                }
            }
            #[unroll]
            for step in 0..comptime!(lanes.ilog2() as usize) {
                // Sums that are kept, and the lane's bit that says which.
                let few = comptime!(EIGHTS >> step);
                let bit = comptime!((2 * lanes as u32) >> step);
                let is_upper = lane & bit != 0;
                #[unroll]
                for i in 0..few {
                    let low = own[i];
                    let high = own[comptime!(few + i)];
                    let given = select(is_upper, low, high);
                    own[i] = select(is_upper, high, low) + shuffle_xor(given, bit);
                }
            }
            let query =
                (across + comptime!((m * ROWS + half * 8) as u32)) / comptime!(tile.members as u32);
            let start = sums + query * comptime!(tile.sums_pitch() as u32) + along * 8;
            #[unroll]
            for i in 0..kept {
                // Columns `2 along` and `2 along + 1` of an eight.
                let at =
                    across % comptime!(lanes as u32) * comptime!(kept as u32) + comptime!(i as u32);
                shared_store(start + at / 2 * 32 + at % 2 * 4, bits_of(own[i]));
            }
        }
    }
}

/// What a block gets that begins at compressed block `place` of the ring of two steps: each stride of its tokens has as much of a compressed block as any other.
#[cube]
fn overlapping(sums: u32, place: u32, #[comptime] tile: MassTile) -> f32 {
    let (strides, before) = comptime!((tile.strides, tile.covered - 1));
    let mut mass = 0.0f32.runtime();
    #[unroll]
    for i in 0..comptime!(strides + before) {
        // The first of the strides that it has in the block, and the last.
        let weight =
            comptime!((before.min(strides + before - 1 - i) + 1 - before.saturating_sub(i)) as f32);
        let at =
            (place + comptime!((2 * STEP + i - before) as u32)) & comptime!(2 * STEP as u32 - 1);
        mass = multiply_add(of_bits(shared_load(sums + at * 4)), weight.runtime(), mass);
    }
    mass
}

/// The highest few of each query: lane `i` has the `i`-th.
#[derive(CubeType)]
struct Chosen {
    keys: Array<u32>,
    blocks: Array<u32>,
    /// Keys that others have to be above.
    last: Array<u32>,
}

#[cube]
fn nothing_chosen(#[comptime] queries: usize) -> Chosen {
    let mut keys = Array::<u32>::new(queries);
    let mut blocks = Array::<u32>::new(queries);
    let mut last = Array::<u32>::new(queries);
    #[unroll]
    for i in 0..queries {
        keys[i] = 0u32.runtime();
        blocks[i] = 0xffff_ffffu32.runtime();
        last[i] = 0u32.runtime();
    }
    Chosen { keys, blocks, last }
}

/// Inserts the keys of some lanes, whose blocks rise, where they are among the highest of a query. Of equal ones those before stay before.
#[cube]
fn insert_all(
    chosen: &mut Chosen,
    key: u32,
    block: u32,
    #[comptime] lanes: u32,
    most: u32,
    #[comptime] query: usize,
) {
    let lane = UNIT_POS_X % 32;
    let mut above = votes_above(key, chosen.last[query]) & lanes;
    while above != 0u32 {
        let source = lowest_bit(above);
        let its_key = word_of(key, source);
        let its_block = word_of(block, source);
        let (own_key, own_block) = (chosen.keys[query], chosen.blocks[query]);
        // As many are no lower.
        let place = count_bits(!votes_above(its_key, own_key));
        let (key_before, block_before) = (word_before(own_key), word_before(own_block));
        let moved_key = select(lane == place, its_key, key_before);
        let moved_block = select(lane == place, its_block, block_before);
        chosen.keys[query] = select(lane < place, own_key, moved_key);
        chosen.blocks[query] = select(lane < place, own_block, moved_block);
        let last = word_of(chosen.keys[query], most - 1);
        chosen.last[query] = last;
        // What was above the last of before may be no more.
        above = above & (above - 1u32) & votes_above(key, last);
    }
}
