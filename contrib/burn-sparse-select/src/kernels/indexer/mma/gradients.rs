//! Kernel of the gradients. A cube has rows, which are (query, head) pairs or keys, in registers as left operands; columns are streamed. For a few columns at a
//! time a warp recomputes the products, then the gradient of each pair, whose register layout is that of a left operand, and multiplies it with the columns.
//! The columns are in shared memory once for both matmuls. Pair gradients are f32, and enter the second matmul as the sum of two numbers in half precision.

// Compile-time conditions stay separate from runtime ones.
#![allow(clippy::collapsible_if)]

use crate::kernels::indexer::gradients::IndexerGradients;
use crate::kernels::indexer::mma::loads::{
    Line, Work, copy_line, copy_queries, key_line, load_left,
};
use crate::kernels::indexer::mma::sums::step_of;
use crate::kernels::indexer::mma::tile::{COLUMNS, EIGHT, EIGHTS, GradientTile, ROWS, UNITS};
use crate::kernels::indexer::pairs::{PairSizes, SharedGradient, SharedGradientLaunch, Sizes};
use blocksparse_cubecl::arch::ptx::{
    global_address, pack, shared_address, shuffle_xor, uniform, unpack,
};
use blocksparse_cubecl::arch::sm80::{
    commit_copies, load_matrices, load_transposes, multiply, shared_load_pair, wait_copies,
    wait_copies_but,
};
use blocksparse_cubecl::prelude::*;
use blocksparse_cubecl::shared::addressing::Four;

/// The two rows of a unit: offsets of their score gradients, or the column of these.
#[derive(CubeType, Clone, Copy)]
struct Pair {
    lower: usize,
    upper: usize,
}

/// Returns the row in memory of the (query, head) pair at index `row · heads + head`.
#[cube]
fn query_line(at: usize, end: usize, entry: usize, s: &Sizes) -> Line {
    let is_there = at < end;
    let at = select(is_there, at, 0usize);
    Line {
        place: (entry * s.heads + at % s.heads) * s.seq_q + s.start + at / s.heads,
        is_there,
    }
}

/// Returns the offset of a row's score gradients; for gradients with respect to keys, the key. Absent rows use those of an existing row, and their products are
/// 0.
#[cube]
fn differences(
    at: usize,
    end: usize,
    entry: usize,
    s: &Sizes,
    #[comptime] t: GradientTile,
) -> usize {
    let mut place = at.min(end - 1);
    if comptime!(!t.by_keys) {
        place = (entry * s.rows + place / s.heads) * s.columns;
    }
    place
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradient(
    q: &[u32],
    k: &[u32],
    weights: &[f32],
    keys: ComptimeOption<Box<[i32]>>,
    by_scores: &[f32],
    out: &mut [f32],
    by_weights: ComptimeOption<Box<[f32]>>,
    s: Sizes,
    of_cubes: SharedGradient,
    #[comptime] t: GradientTile,
) {
    let of = comptime!(t.step);
    let smem: Shared<[u32]> = Shared::new_aligned_slice(comptime!(of.shared_bytes() / 4), 128usize);
    let base = shared_address(&smem);
    let (tiles, parts) = (of_cubes.tiles, of_cubes.parts);
    let exists = CUBE_POS < tiles;
    let cube = CUBE_POS.min(tiles - 1);
    let part = cube % parts;
    let tile = cube / parts;
    let mut entry = tile / of_cubes.row_tiles;
    let mut row0 = tile % of_cubes.row_tiles * comptime!(ROWS);
    // Query whose listed keys are read, if keys are listed.
    let mut lister = 0usize.runtime();
    // End of the rows (exclusive).
    let mut row_end = s.rows * s.heads;
    let mut first = 0usize.runtime();
    let mut steps = s.columns.div_ceil(comptime!(COLUMNS));
    if comptime!(t.by_keys) {
        row_end = s.seq_kv;
        if comptime!(t.causal) {
            let position = s.position(0usize);
            first = max(row0, position) - position;
        }
        let all = (max(first, s.rows) - first).div_ceil(comptime!(of.queries));
        let all = all * comptime!(of.parts);
        steps = (max(all, part) - part).div_ceil(parts);
    } else if comptime!(of.is_listed) {
        lister = entry % s.rows;
        entry /= s.rows;
        row0 += lister * s.heads;
        row_end = (lister + 1) * s.heads;
    } else {
        let last = (row0 + comptime!(ROWS - 1)).min(row_end - 1) / s.heads;
        steps = (s.position(last) + 1).div_ceil(comptime!(COLUMNS));
    }
    // Surplus cubes do nothing.
    if !exists {
        steps = 0usize.runtime();
    }
    let work = Work {
        entry,
        column0: lister,
        first,
        end: s.rows,
        base,
        warp: uniform(UNIT_POS_X / 32),
        lane: UNIT_POS_X % 32,
    };
    let (q_at, k_at, weights_at) = (
        global_address::<u32>(q),
        global_address::<u32>(k),
        global_address::<f32>(weights),
    );
    let warp_row = row0 + work.warp as usize * 16;
    let own = warp_row + work.lane as usize / 4;
    let rows = Pair {
        lower: differences(own, row_end, entry, &s, t),
        upper: differences(own + 8, row_end, entry, &s, t),
    };
    let stage_bytes = comptime!(of.stage_bytes() as u32);
    let stages_end = base + comptime!(of.shared_bytes() as u32);
    let mut left = Array::<Vector<u32, Four>>::new(comptime!(of.depth()));
    let mut sums = Array::<Vector<f32, Four>>::new(comptime!(2 * of.depth()));
    #[unroll]
    for i in 0..comptime!(2 * of.depth()) {
        sums[i] = Vector::<f32, Four>::zeroed();
    }
    let mut weight_sums = Array::<f32>::new(2usize);
    weight_sums[0] = 0.0f32;
    weight_sums[1] = 0.0f32;

    if steps > 0 {
        let mut at = UNIT_POS_X as usize;
        while at < comptime!(ROWS * of.pieces()) {
            let row = row0 + at / comptime!(of.pieces());
            if comptime!(t.by_keys) {
                let line = Line {
                    place: entry * s.seq_kv + row,
                    is_there: row < row_end,
                };
                copy_line(k_at, line, at, base, of);
            } else {
                copy_line(q_at, query_line(row, row_end, entry, &s), at, base, of);
            }
            at += comptime!(UNITS);
        }
        wait_copies();
        sync_cube();
        load_left(&mut left, base, &work, 0usize, of);
        sync_cube();

        let mut ahead = 0usize.runtime();
        let mut target = base;
        #[unroll]
        for _ in 0..comptime!(of.stages - 1) {
            if ahead < steps {
                let number = part + ahead * parts;
                copy_step(q_at, k_at, weights_at, &keys, number, &work, &s, target, t);
            }
            commit_copies();
            ahead += 1;
            target += stage_bytes;
        }
        let mut stage = base;
        for at in 0..steps {
            wait_copies_but(comptime!(of.stages - 2));
            sync_cube();
            if ahead < steps {
                let number = part + ahead * parts;
                copy_step(q_at, k_at, weights_at, &keys, number, &work, &s, target, t);
            }
            commit_copies();
            ahead += 1;
            target += stage_bytes;
            if target == stages_end {
                target = base;
            }
            // First column, or first query.
            let mut column = at * comptime!(COLUMNS);
            let mut is_seen = warp_row < row_end;
            if comptime!(t.by_keys) {
                column = step_of(part + at * parts, 0usize, &work, of).row;
                if comptime!(t.causal) {
                    let last = s.position(column + comptime!(of.queries - 1));
                    is_seen = is_seen && warp_row <= last;
                }
            } else if comptime!(t.causal) {
                let last = (warp_row + 15).min(row_end - 1) / s.heads;
                is_seen = is_seen && column <= s.position(last);
            }
            if uniform(select(is_seen, 1u32, 0u32)) != 0u32 {
                add_step(
                    &left,
                    &mut sums,
                    &mut weight_sums,
                    by_scores,
                    &rows,
                    column,
                    &work,
                    &s,
                    stage,
                    t,
                );
            }
            stage += stage_bytes;
            if stage == stages_end {
                stage = base;
            }
        }
    }

    if exists {
        // For gradients with respect to keys each part has its own sums.
        let part_start = part * s.batch * s.seq_kv * comptime!(of.width);
        let quarter = work.lane as usize % 4;
        #[unroll]
        for half in 0..2usize {
            let row = own + comptime!(8 * half);
            let is_there = row < row_end;
            let mut place = entry * s.seq_kv + row;
            let mut factor = of_cubes.factor;
            if comptime!(!t.by_keys) {
                place = query_line(row, row_end, entry, &s).place;
                let mut sum = weight_sums[half];
                sum += shuffle_xor(sum, 1u32);
                sum += shuffle_xor(sum, 2u32);
                if is_there && quarter == 0 {
                    let mut by_weights = by_weights.clone().unwrap();
                    by_weights[place] = sum * factor;
                }
                factor *= weights[place] * comptime!(1.0 / t.scale());
            }
            if is_there {
                let start = part_start + place * comptime!(of.width) + 2 * quarter;
                #[unroll]
                for eight in 0..comptime!(t.width_eights()) {
                    #[unroll]
                    for odd in 0..2usize {
                        let sum = sums[eight].extract(comptime!(2 * half + odd));
                        let at = start + comptime!(eight * EIGHT + odd);
                        let mut number = sum * factor;
                        if comptime!(t.adds) {
                            number += out[at];
                        }
                        out[at] = number;
                    }
                }
            }
        }
    }
}

/// Starts to copy a step.
#[cube]
fn copy_step(
    q: u64,
    k: u64,
    weights: u64,
    keys: &ComptimeOption<Box<[i32]>>,
    number: usize,
    work: &Work,
    s: &Sizes,
    stage: u32,
    #[comptime] t: GradientTile,
) {
    let of = comptime!(t.step);
    if comptime!(t.by_keys) {
        let step = step_of(number, 0usize, work, of);
        copy_queries(q, weights, &step, work, s, stage, of);
    } else {
        let mut at = UNIT_POS_X as usize;
        while at < comptime!(COLUMNS * of.pieces()) {
            let column = number * comptime!(COLUMNS) + at / comptime!(of.pieces());
            let line = key_line(
                keys,
                work.entry,
                0usize,
                work.column0,
                column,
                s,
                of.is_listed,
            );
            copy_line(k, line, at, stage, of);
            at += comptime!(UNITS);
        }
    }
}

/// Accumulates the columns of a step: keys from `column` on, or (query, head) pairs from query `column` on.
#[cube]
fn add_step(
    left: &Array<Vector<u32, Four>>,
    sums: &mut Array<Vector<f32, Four>>,
    weight_sums: &mut Array<f32>,
    by_scores: &[f32],
    rows: &Pair,
    column: usize,
    work: &Work,
    s: &Sizes,
    stage: u32,
    #[comptime] t: GradientTile,
) {
    let of = comptime!(t.step);
    let (depth, eights) = comptime!((of.depth(), of.eights()));
    let lane = work.lane;
    let right =
        stage + (lane % 8 + lane / 16 * 8) * comptime!(of.pitch() as u32) + lane / 8 % 2 * 16;
    let across = stage + lane % 16 * comptime!(of.pitch() as u32) + lane / 16 * 16;
    let pair = stage + comptime!(of.of_rows() as u32) + lane % 4 * 8;
    let quarter = lane as usize % 4;
    let mut found = Array::<f32>::new(2usize);
    #[unroll]
    for four in 0..comptime!(eights.div_ceil(EIGHTS)) {
        let count = comptime!((eights - four * EIGHTS).min(EIGHTS));
        let mut products = Array::<Vector<f32, Four>>::new(count);
        #[unroll]
        for i in 0..count {
            products[i] = Vector::<f32, Four>::zeroed();
        }
        #[unroll]
        for d in 0..depth {
            #[unroll]
            for two in 0..comptime!(count / 2) {
                let rows = comptime!((four * EIGHTS + 2 * two) * EIGHT);
                let columns = load_matrices(right, comptime!(rows * of.pitch() + d * 32));
                #[unroll]
                for half in 0..2usize {
                    let at = comptime!(2 * two + half);
                    products[at] = multiply(
                        left[d],
                        columns.extract(comptime!(2 * half)),
                        columns.extract(comptime!(2 * half + 1)),
                        products[at],
                        comptime!(of.element()),
                    );
                }
            }
        }
        #[unroll]
        for two in 0..comptime!(count / 2) {
            let mut high = Vector::<u32, Four>::zeroed();
            let mut low = Vector::<u32, Four>::zeroed();
            #[unroll]
            for half in 0..2usize {
                let eight = comptime!(four * EIGHTS + 2 * two + half);
                let product = products[comptime!(2 * two + half)];
                let mut given = Array::<f32>::new(4usize);
                if comptime!(t.by_keys) {
                    // Both columns belong to one query.
                    let of_step = comptime!(eight * EIGHT / of.heads)
                        + quarter * 2 / comptime!(of.heads.min(EIGHT));
                    let query = column + of_step;
                    // All eight columns belong to one query, and possibly several groups of eight do. Those of absent queries have products of 0.
                    if comptime!(eight == 0 || of.ends(eight)) {
                        let start = (work.entry * s.rows + query.min(s.rows - 1)) * s.columns;
                        found[0] = by_scores[start + rows.lower];
                        found[1] = by_scores[start + rows.upper];
                    }
                    let of_rows = shared_load_pair(pair + comptime!((eight * EIGHT * 4) as u32));
                    #[unroll]
                    for odd in 0..2usize {
                        let weight = f32::reinterpret(of_rows.extract(odd));
                        given[odd] = found[0] * weight;
                        given[comptime!(2 + odd)] = found[1] * weight;
                    }
                } else {
                    #[unroll]
                    for odd in 0..2usize {
                        let key = column + comptime!(eight * EIGHT + odd) + 2 * quarter;
                        // Absent keys have products of 0.
                        let key = key.min(s.columns - 1);
                        let lower = by_scores[rows.lower + key];
                        let mut upper = lower;
                        if comptime!(!t.alike) {
                            upper = by_scores[rows.upper + key];
                        }
                        weight_sums[0] += lower * max(product.extract(odd), 0.0f32);
                        weight_sums[1] += upper * max(product.extract(comptime!(2 + odd)), 0.0f32);
                        given[odd] = lower * comptime!(t.scale());
                        given[comptime!(2 + odd)] = upper * comptime!(t.scale());
                    }
                }
                #[unroll]
                for i in 0..4usize {
                    given[i] = select(product.extract(i) > 0.0f32, given[i], 0.0f32);
                }
                #[unroll]
                for row in 0..2usize {
                    let first = given[comptime!(2 * row)];
                    let second = given[comptime!(2 * row + 1)];
                    let own = comptime!(of.half);
                    let rounded = pack(first, second, own);
                    let place = comptime!(2 * half + row);
                    high.insert(place, rounded);
                    let first = first - unpack(rounded, false, own);
                    let second = second - unpack(rounded, true, own);
                    low.insert(place, pack(first, second, own));
                }
            }
            let rows = comptime!((four * EIGHTS + 2 * two) * EIGHT);
            #[unroll]
            for d in 0..comptime!(depth.div_ceil(2)) {
                let count = comptime!((depth - 2 * d).min(2));
                let mut numbers = Array::<Vector<u32, Four>>::new(count);
                #[unroll]
                for i in 0..count {
                    let at = comptime!(rows * of.pitch() + (2 * d + i) * 32);
                    numbers[i] = load_transposes(across, at);
                }
                // Adjacent instructions use different accumulators, which hides the latency of mma.sync.
                #[unroll]
                for part in 0..2usize {
                    let own = if comptime!(part == 0) { high } else { low };
                    #[unroll]
                    for i in 0..comptime!(2 * count) {
                        let at = comptime!(4 * d + i);
                        sums[at] = multiply(
                            own,
                            numbers[comptime!(i / 2)].extract(comptime!(i % 2 * 2)),
                            numbers[comptime!(i / 2)].extract(comptime!(i % 2 * 2 + 1)),
                            sums[at],
                            comptime!(of.element()),
                        );
                    }
                }
            }
        }
    }
}

/// Arguments of a launch.
#[derive(Clone, Copy, Debug)]
pub struct GradientWork<'a> {
    /// Rows of a listing query or of a batch entry, the number of these, and the number of parts.
    pub lines: usize,
    pub groups: usize,
    pub parts: usize,
    /// The gradient with its number of elements, and the gradient with respect to the weights.
    pub out: (&'a Handle, usize),
    pub by_weights: Option<&'a Handle>,
}

/// Launches a gradient, see [`by_queries`](crate::kernels::indexer::by_queries) and [`by_keys`](crate::kernels::indexer::by_keys).
///
/// # Errors
/// [`KernelError`] if there are more tiles than a launch has cubes, or the device cannot index the elements.
pub fn launch_gradient(
    client: &Client,
    sizes: &PairSizes,
    gradients: &IndexerGradients,
    work: GradientWork,
    t: GradientTile,
) -> Result<(), KernelError> {
    let row_tiles = work.lines.div_ceil(ROWS);
    let tiles = work.groups * row_tiles * work.parts;
    let [q, k] = sizes.inputs();
    let largest = q.max(k).max(work.out.1).max(sizes.elements());
    let address = address_of(client, largest.max(2 * tiles))?;
    let cubes = spread(client, tiles as u64)?;
    let inputs = &gradients.inputs;
    // SAFETY: a unit copies pieces of existing rows of queries and keys, and reads existing entries of pairs; it writes its own elements of existing rows.
    // Lists hold keys of the sequence or negative numbers. The buffers have the lengths that `buffer` gets.
    unsafe {
        gradient::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            address,
            buffer(inputs.q, q / 2),
            buffer(inputs.k, k / 2),
            buffer(inputs.of_rows, sizes.row_elements()),
            optional(inputs.keys, sizes.list_elements()),
            buffer(gradients.by_scores, sizes.elements()),
            buffer(work.out.0, work.out.1),
            optional(work.by_weights, sizes.row_elements()),
            sizes.launch(),
            SharedGradientLaunch::new(row_tiles, tiles, work.parts, gradients.factor as f32),
            t,
        );
    }
    Ok(())
}
