//! Kernel of the sums. A cube has keys, in registers as left operands, and some queries, whose heads are streamed as columns. A unit sums a few of a query's
//! heads, and three adjacent units sum the others.

// Compile-time conditions stay separate from runtime ones.
#![allow(clippy::collapsible_if)]

use crate::kernels::indexer::mma::loads::{Step, Work, copy_queries, load_keys};
use crate::kernels::indexer::mma::tile::{EIGHT, SumTile, UNITS};
use crate::kernels::indexer::pairs::{
    Ending, Epilogue, PairInputs, PairSizes, Sizes, finished, key_of, term,
};
use blocksparse_cubecl::arch::ptx::{global_address, shared_address, shuffle_xor, uniform, unit};
use blocksparse_cubecl::arch::sm80::{
    commit_copies, load_matrices, multiply, shared_load_pair, wait_copies_but,
};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::addressing::Four;

#[cube(launch_unchecked, address_type = "dynamic")]
fn sums(
    q: &[u32],
    k: &[u32],
    of_rows: &[f32],
    keys: ComptimeOption<Box<[i32]>>,
    out: &mut [f32],
    s: Sizes,
    // Number of tiles along keys, of runs of queries, of queries of a run, and of all tiles.
    key_tiles: usize,
    runs: usize,
    run: usize,
    tiles: usize,
    ending: Ending,
    #[comptime] t: SumTile,
) {
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(t.shared_bytes() / 4), 128usize);
    let base = shared_address(&smem);
    let tile = CUBE_POS.min(tiles - 1);
    let column0 = tile % key_tiles * comptime!(t.keys());
    let row0 = tile / key_tiles % runs * run;
    let end = (row0 + run).min(s.rows);
    // Skips queries before the first that sees a key.
    let mut first = row0;
    if comptime!(!t.is_listed && !t.all) {
        let position = s.position(0usize);
        first = max(row0, max(column0, position) - position);
    }
    let work = Work {
        entry: tile / key_tiles / runs,
        column0,
        first,
        end,
        base,
        warp: uniform(UNIT_POS_X / 32),
        lane: UNIT_POS_X % 32,
    };
    let mut steps = (max(first, end) - first).div_ceil(comptime!(t.queries)) * comptime!(t.parts);
    // Surplus cubes, and those after the end of a list, do nothing.
    let mut is_needed = CUBE_POS < tiles;
    if comptime!(t.is_listed) {
        let column = column0.min(s.columns - 1);
        is_needed = is_needed && key_of(&keys, work.entry, row0, column, &s, true) >= 0i32;
    }
    if !is_needed {
        steps = 0usize.runtime();
    }
    let sources = (
        global_address::<u32>(q),
        global_address::<u32>(k),
        global_address::<f32>(of_rows),
    );
    let stage_bytes = comptime!(t.stage_bytes() as u32);
    let stages_end = base + comptime!(t.shared_bytes() as u32);
    // Address of the lane's row of a right operand, and of its two columns of each group of eight.
    let lane = work.lane;
    let right = (lane % 8 + lane / 16 * 8) * comptime!(t.pitch() as u32) + lane / 8 % 2 * 16;
    let pair = comptime!(t.of_rows() as u32) + lane % 4 * 8;
    let warp_column = column0 + work.warp as usize * comptime!(t.warp_keys());
    let mut left = Array::<Vector<u32, Four>>::new(comptime!(t.sixteens * t.depth()));
    let mut totals = Array::<f32>::new(comptime!(2 * t.sixteens));
    #[unroll]
    for i in 0..comptime!(2 * t.sixteens) {
        totals[i] = 0.0f32;
    }

    if steps > 0 {
        for kv_head in 0..s.kv_heads {
            load_keys(sources.1, &keys, &mut left, kv_head, &work, &s, t);
            let mut ahead = 0usize.runtime();
            let mut target = base;
            #[unroll]
            for _ in 0..comptime!(t.stages - 1) {
                if ahead < steps {
                    let step = step_of(ahead, kv_head, &work, t);
                    copy_queries(sources.0, sources.2, &step, &work, &s, target, t);
                }
                commit_copies();
                ahead += 1;
                target += stage_bytes;
            }
            let mut stage = base;
            for at in 0..steps {
                wait_copies_but(comptime!(t.stages - 2));
                sync_cube();
                if ahead < steps {
                    let step = step_of(ahead, kv_head, &work, t);
                    copy_queries(sources.0, sources.2, &step, &work, &s, target, t);
                }
                commit_copies();
                ahead += 1;
                target += stage_bytes;
                if target == stages_end {
                    target = base;
                }
                let step = step_of(at, kv_head, &work, t);
                // The last query has the highest position.
                let last = s.position(step.row + comptime!(t.queries - 1));
                let mut is_seen = 1u32.runtime();
                if comptime!(!t.is_listed && !t.all) {
                    is_seen = uniform(select(warp_column <= last, 1u32, 0u32));
                }
                if is_seen != 0u32 {
                    add_step(
                        &left,
                        &mut totals,
                        &keys,
                        out,
                        &step,
                        &work,
                        &s,
                        &ending,
                        stage + right,
                        stage + pair,
                        t,
                    );
                }
                stage += stage_bytes;
                if stage == stages_end {
                    stage = base;
                }
            }
        }
    }
}

/// Returns a step by its index.
#[cube]
pub(crate) fn step_of(at: usize, kv_head: usize, work: &Work, #[comptime] t: SumTile) -> Step {
    Step {
        row: work.first + at / comptime!(t.parts) * comptime!(t.queries),
        head0: at % comptime!(t.parts) * comptime!(t.heads),
        kv_head,
    }
}

/// Accumulates the heads of a step, and writes the sums of queries that end with it.
#[cube]
fn add_step(
    left: &Array<Vector<u32, Four>>,
    totals: &mut Array<f32>,
    keys: &ComptimeOption<Box<[i32]>>,
    out: &mut [f32],
    step: &Step,
    work: &Work,
    s: &Sizes,
    ending: &Ending,
    right: u32,
    pair: u32,
    #[comptime] t: SumTile,
) {
    let (sixteens, depth, eights) = comptime!((t.sixteens, t.depth(), t.eights()));
    let is_last = step.head0 == comptime!((t.parts - 1) * t.heads);
    #[unroll]
    for two in 0..comptime!(eights.div_ceil(2)) {
        let mut products = Array::<Vector<f32, Four>>::new(comptime!(2 * sixteens));
        #[unroll]
        for i in 0..comptime!(2 * sixteens) {
            products[i] = Vector::<f32, Four>::zeroed();
        }
        #[unroll]
        for d in 0..depth {
            let columns = load_matrices(right, comptime!(two * 16 * t.pitch() + d * 32));
            #[unroll]
            for m in 0..sixteens {
                #[unroll]
                for half in 0..comptime!((eights - 2 * two).min(2)) {
                    let at = comptime!(2 * m + half);
                    products[at] = multiply(
                        left[comptime!(m * depth + d)],
                        columns.extract(comptime!(2 * half)),
                        columns.extract(comptime!(2 * half + 1)),
                        products[at],
                        comptime!(t.element()),
                    );
                }
            }
        }
        #[unroll]
        for half in 0..comptime!((eights - 2 * two).min(2)) {
            let eight = comptime!(2 * two + half);
            let of_rows = shared_load_pair(pair + comptime!((eight * EIGHT * 4) as u32));
            let mut first = f32::reinterpret(of_rows.extract(0usize));
            let mut second = f32::reinterpret(of_rows.extract(1usize));
            if comptime!(t.is_weights) {
                first *= comptime!(std::f32::consts::LOG2_E);
                second *= comptime!(std::f32::consts::LOG2_E);
            }
            #[unroll]
            for i in 0..comptime!(2 * sixteens) {
                let product = products[comptime!(i / 2 * 2 + half)];
                let one = product.extract(comptime!(i % 2 * 2));
                let other = product.extract(comptime!(i % 2 * 2 + 1));
                totals[i] += term(one, first, ending, t.is_weights);
                totals[i] += term(other, second, ending, t.is_weights);
            }
            if comptime!(t.ends(eight + 1)) {
                if is_last {
                    let lanes = comptime!(t.sharing());
                    let of_step =
                        comptime!(eight * EIGHT / t.heads) + (work.lane % 4) as usize / lanes;
                    let row = step.row + of_step;
                    store(totals, keys, out, row, step, work, s, ending, t);
                }
            }
        }
    }
}

/// Writes the sums of a query, and resets them for the next.
#[cube]
fn store(
    totals: &mut Array<f32>,
    keys: &ComptimeOption<Box<[i32]>>,
    out: &mut [f32],
    row: usize,
    step: &Step,
    work: &Work,
    s: &Sizes,
    ending: &Ending,
    #[comptime] t: SumTile,
) {
    let lanes = comptime!(t.sharing());
    // Read again, which frees the registers of derived values during the matmul.
    let lane = unit() as usize % 32;
    let own = lane % lanes;
    let warp_column = work.column0 + work.warp as usize * comptime!(t.warp_keys());
    #[unroll]
    for i in 0..comptime!(2 * t.sixteens) {
        #[unroll]
        for trade in 0..comptime!(lanes.ilog2()) {
            totals[i] += shuffle_xor(totals[i], comptime!(1u32 << trade));
        }
    }
    let position = s.position(row);
    // Each of the lanes that share sums writes different ones.
    #[unroll]
    for j in 0..comptime!(2 * t.sixteens / lanes) {
        let mut sum = totals[comptime!(j * lanes)];
        #[unroll]
        for i in 1..lanes {
            sum = select(own == i, totals[comptime!(j * lanes + i)], sum);
        }
        let within = (comptime!(j * lanes) + own) * 8 + lane / 4;
        let column = warp_column + within;
        if row < work.end && column < s.columns {
            let at = (work.entry * s.rows + row) * s.columns + column;
            let mut is_last = true.runtime();
            if comptime!(t.adds) {
                if step.kv_head > 0 {
                    sum += out[at];
                }
                is_last = step.kv_head + 1 == s.kv_heads;
            }
            if is_last {
                let key = key_of(keys, work.entry, row, column, s, t.is_listed);
                sum = finished(sum, key, position, s.heads, ending, t.is_weights);
            }
            out[at] = sum;
        }
    }
    #[unroll]
    for i in 0..comptime!(2 * t.sixteens) {
        totals[i] = 0.0f32;
    }
}

/// Launches the sums, see [`pair_sums`](crate::kernels::indexer::pair_sums).
///
/// # Errors
/// [`KernelError`] if there are more tiles than a launch has cubes, or the device cannot index the elements.
pub fn launch(
    client: &Client,
    sizes: &PairSizes,
    inputs: &PairInputs,
    epilogue: Epilogue,
    out: &Handle,
    t: SumTile,
) -> Result<(), KernelError> {
    let run = t.run(client, sizes);
    let key_tiles = t.key_tiles(sizes);
    let runs = sizes.rows[1].div_ceil(run);
    let tiles = sizes.batch * runs * key_tiles;
    let [q, k] = sizes.inputs();
    let address = address_of(client, q.max(k).max(sizes.elements()).max(2 * tiles))?;
    let cubes = spread(client, tiles as u64)?;
    let ending = epilogue.ending(t.is_weights);
    // SAFETY: a unit copies pieces of existing rows of queries and keys, and writes its own entries of existing rows and columns; lists hold keys of the
    // sequence or negative numbers. The buffers have the lengths that `buffer` gets.
    unsafe {
        sums::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            buffer(inputs.q, q / 2),
            buffer(inputs.k, k / 2),
            buffer(inputs.of_rows, sizes.row_elements()),
            optional(inputs.keys, sizes.list_elements()),
            buffer(out, sizes.elements()),
            sizes.launch(),
            key_tiles,
            runs,
            run,
            tiles,
            ending,
            t,
        );
    }
    Ok(())
}
