//! The backward kernel: one kernel for dQ (a loop over rows) and for dK and dV (a loop over columns), one cube per tile,
//! one warp per 16 or 32 rows of it.
//!
//! ```text
//!            a1  a2   b1  b2        s  = a1 · b1ᵀ      p  = exp2(s · log2_scale − lse)
//! rows       q   dO   k   v         dp = a2 · b2ᵀ      ds = p ∘ (dp − delta)
//! columns    k   v    q   dO        out1 += ds · b1    out2 += p · b2   (columns only)
//! ```
//!
//! While step j is computed, the rows of step j + 1 are copied, and the positions of step j + 2 worked out. p and ds
//! are left operands in registers. In a loop over columns s, p, dp and ds are transposes, and lse and delta belong to columns:
//! they are copied with the step. `out1 · scale` is dQ or dK, out2 is dV. Biases are added to s as forward; with dropout p in `p · b2`, and
//! dp, have the factors of the forward pass.

// What is known at compile time stays apart from what is not; kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::backward_loads::*;
use super::bias_gradient::*;
use super::dropout::*;
use super::gather::*;
use super::product::*;
use super::score::*;
use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::{Four, OperandStrides, Schedule, batch_of, head_of};
use crate::shared::dropout::DropoutArgs;
use crate::shared::score::ScoreScalars;
use blocksparse::plan::Mainloop;

/// Lengths of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct MainloopLengths {
    /// Places of a head in the stats.
    pub pitch: u32,
    /// Query heads to a head of keys.
    pub heads_per_kv: u32,
    /// The word where dV begins.
    pub second: u32,
    /// Cubes that share the steps of a tile.
    pub chunks: u32,
}

/// `a1`, `a2`, `b1`, `b2` with any strides of 16 bytes in their outer dimensions, in words; `stats`
/// `[batch · heads, pitch, 2]`: `lse · log2 e` and delta of the query at each place, and behind them the ALiBi slopes; `out` `[batch, heads, len, dim]` in words,
/// out2 from word `second` on. With `carry` the results are added to it.
///
/// With `t.bias_gradient` `out` is the gradient of the bias, to which `ds` is added without the softcap's factor: a loop over rows adds it pair by
/// pair, a loop over columns, where all queries share a row of the bias, a sum for each key, and is launched for query heads. Batch
/// entries and heads that share a bias are in slices of their own, so that every element has one writer at a time.
#[cube(launch_unchecked)]
pub fn backward(
    a1: &[u32],
    a2: &[u32],
    b1: &[u32],
    b2: &[u32],
    stats: &[f32],
    biases: BiasArgs,
    out: &mut [u32],
    plan: &[u32],
    strides: OperandStrides<Strides>,
    schedule: Schedule,
    lengths: MainloopLengths,
    numbers: ScoreScalars,
    dropout: DropoutArgs,
    #[comptime] mainloop: Mainloop,
    #[comptime] t: Tile,
) {
    let parts = schedule.parts;
    let listing = schedule.listing;
    let slice = schedule.slice;
    let a1_strides = strides.a1;
    let a2_strides = strides.a2;
    let b1_strides = strides.b1;
    let b2_strides = strides.b2;
    let heads_per_kv = lengths.heads_per_kv;
    let columns = comptime!(matches!(mainloop, Mainloop::Columns));
    let tiles = comptime!(t.warp_tiles);
    let eights = comptime!(t.eights());
    let smem: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(t.shared_bytes(true) / 4), 128usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let outer = head_of(&slice) as u32;
    let batch = batch_of(&slice) as u32;

    // In a loop over columns a tile of keys goes through all query heads of its group.
    let mut first_head = outer;
    let mut turns = 1u32;
    let mut heads = slice.heads as u32;
    let mut divisor = heads_per_kv;
    // The head of the tile's own rows.
    let mut own_head = outer;
    if comptime!(columns && t.bias_gradient) {
        own_head = outer / heads_per_kv;
        divisor = 1u32;
    } else if comptime!(columns) {
        first_head = outer * heads_per_kv;
        turns = heads_per_kv;
        heads *= heads_per_kv;
        divisor = 1u32;
    }
    let heads_at = parts.heads + batch as usize * parts.batch;
    let record0 = plan[heads_at + first_head as usize] as usize;
    let pieces = comptime!(t.bias_gradient && !columns);
    let mut rank = CUBE_POS_X;
    if comptime!(pieces) {
        rank = CUBE_POS_X / lengths.chunks;
    }
    let ranked = parts.order + (record0 + rank as usize) * 4;
    let tile = plan[ranked];

    let cursor = Cursor {
        head: RuntimeCell::<u32>::new(first_head),
        end: first_head + turns,
        entry: RuntimeCell::<usize>::new(0usize),
        j: RuntimeCell::<u32>::new(0u32),
        steps: RuntimeCell::<u32>::new(0u32),
    };
    open(plan, &parts, ranked + 1, &cursor);
    // Steps add to what is in memory, and none needs another: cubes share those of a tile.
    let mut first_step = 0u32;
    if comptime!(pieces) {
        let steps = cursor.steps.read();
        let chunks = lengths.chunks;
        let chunk = CUBE_POS_X % chunks;
        first_step = uniform(steps * chunk / chunks);
        cursor.j.store(first_step);
        cursor.steps.store(uniform(steps * (chunk + 1) / chunks));
    }
    let last_step = cursor.steps.read();
    let loads = Loads {
        b1: address::<u32>(b1),
        b2: address::<u32>(b2),
        stats: address::<f32>(stats),
        base,
        batch,
        heads,
        divisor,
        pitch: lengths.pitch,
    };
    let rows = own_rows(&parts, record0, tile, t);
    own_positions(base, plan, rows, &listing, a1_strides.len, t);
    let found = next_place(plan, &parts, heads_at, tile, &cursor, columns, t);
    let mut loaded = found.place;
    store_place(base, 0u32, &found, &listing, b1_strides.len, t);
    let found = next_place(plan, &parts, heads_at, tile, &cursor, columns, t);
    store_place(base, 1u32, &found, &listing, b1_strides.len, t);
    sync_cube();

    let a1_at = base + comptime!(t.a1_offset() as u32);
    let a2_at = base + comptime!(t.a2_offset() as u32);
    clear_rows(base, t);
    copy_rows(
        head_address(address::<u32>(a1), &a1_strides, batch, own_head),
        a1_strides.row,
        base,
        a1_at,
        comptime!(t.rows()),
        comptime!(t.head_dim),
        t,
    );
    if comptime!(t.outputs.first()) {
        copy_rows(
            head_address(address::<u32>(a2), &a2_strides, batch, own_head),
            a2_strides.row,
            base,
            a2_at,
            comptime!(t.rows()),
            comptime!(t.value_dim),
            t,
        );
    }
    copy_step(&loads, &b1_strides, &b2_strides, 0u32, loaded, columns, t);
    loaded = found.place;

    let warp_rows = warp * comptime!(16 * t.warp_tiles as u32);
    let first_row = warp_rows + lane / 4;
    let quad = lane % 4 * 2;
    let operands = operand_places(base, warp_rows, lane, t);

    // Of the unit's rows, if they are queries.
    let mut row_lse = Array::<f32>::new(comptime!(2 * tiles));
    let mut row_delta = Array::<f32>::new(comptime!(2 * tiles));
    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        row_lse[i] = f32::new(0.0);
        row_delta[i] = f32::new(0.0);
        if comptime!(!columns) {
            let place = own_place(plan, rows, first_row + comptime!(i as u32 * ROW_PAIR), t);
            if place < lengths.pitch {
                let at = ((batch * heads + outer) * lengths.pitch + place) as usize * 2;
                row_lse[i] = stats[at];
                row_delta[i] = stats[at + 1];
            }
        }
    }

    let gradient = gradient_rows(&out[..], &biases.strides, batch, outer, t);
    let key_pairs = comptime!(if t.bias_gradient { 2 * tiles } else { 0 });
    let mut key_sums = Array::<f32>::new(comptime!(key_pairs.max(1)));
    #[unroll]
    for i in 0..key_pairs {
        key_sums[i] = f32::new(0.0);
    }
    let size1 = comptime!(if t.outputs.first() && !t.bias_gradient {
        tiles * t.head_dim / 8
    } else {
        1
    });
    let size2 = comptime!(if columns && t.outputs.second() {
        tiles * t.value_dim / 8
    } else {
        1
    });
    let mut out1 = Array::<Vector<f32, Four>>::new(size1);
    let mut out2 = Array::<Vector<f32, Four>>::new(size2);
    #[unroll]
    for i in 0..size1 {
        out1[i] = Vector::<f32, Four>::zeroed();
    }
    #[unroll]
    for i in 0..size2 {
        out2[i] = Vector::<f32, Four>::zeroed();
    }

    let none = Array::<Vector<u32, Four>>::new(1usize);
    let own = base + first_row * 4;
    let mut done = 0u32;
    for turn in 0..turns {
        let head = first_head + turn;
        let mut slope = f32::new(0.0);
        if comptime!(t.score.alibi) {
            slope = stats[(slice.batches as u32 * heads * lengths.pitch * 2 + head) as usize];
        }
        let of_head = Biases {
            slope,
            shift: b1_strides.len - a1_strides.len,
            address: bias_address(&biases.bias, &biases.strides, batch, head, t),
            row: biases.strides.row,
            table: table_of_head(&biases.table, head, t),
        };
        let record = parts.tiles
            + (plan[heads_at + (first_head + turn) as usize] as usize + tile as usize) * 3;
        let entry0 = parts.entries + plan[record] as usize * 2;
        let steps = uniform(plan[record + 1]);
        let masked = uniform(plan[record + 2]);
        let mut end = steps;
        if comptime!(pieces) {
            end = last_step;
        }
        for j in first_step..end {
            let stage = done & 1;
            let positions = base + comptime!(t.slot_offset() as u32) + slot_of(done, t);
            wait_copies();
            sync_cube();
            copy_step(
                &loads,
                &b1_strides,
                &b2_strides,
                done + 1,
                loaded,
                columns,
                t,
            );
            let found = next_place(plan, &parts, heads_at, tile, &cursor, columns, t);
            loaded = found.place;
            let pairs = PairPlaces {
                batch,
                head,
                rows: own,
                cols: positions,
                lane,
            };
            let kept_bits = kept_pairs(&dropout.mask, &pairs, columns, t);

            let b1_stage = stage * comptime!(t.b1_bytes() as u32);
            let b2_stage = stage * comptime!(t.b2_bytes() as u32);
            let stats_stage = operands.stats + stage * comptime!(t.stats_bytes() as u32);
            let mut s = product(
                operands.a1_rows,
                &none,
                operands.b1_cols + b1_stage,
                false,
                comptime!(t.head_dim),
                t,
            );
            if comptime!(t.score.softcap) {
                cap(&mut s, numbers.softcap, numbers.cap_scale, t);
            }
            let mut cap_slope = Array::<Vector<f32, Four>>::new(comptime!(if t.score.softcap {
                tiles * eights
            } else {
                1
            }));
            if comptime!(t.score.softcap) {
                let inverse = Vector::new(reciprocal(numbers.softcap));
                #[unroll]
                for n in 0..comptime!(tiles * eights) {
                    let ratio = s[n] * inverse;
                    cap_slope[n] = Vector::new(1.0f32) - ratio * ratio;
                }
            }
            if comptime!(t.score.biased()) {
                let cols = positions + quad * 4;
                add_biases(&mut s, &of_head, numbers.cap_scale, own, cols, columns, t);
                add_distances(&mut s, &biases.table, &of_head, own, cols, columns, t);
            }
            if j < masked {
                let entry = entry0 + (j * comptime!(t.entries() as u32 * 2)) as usize;
                mask(&mut s, plan, parts.masks, entry, first_row, quad, t);
            }
            #[unroll]
            for n in 0..eights {
                let mut stats = Vector::<f32, Four>::zeroed();
                if comptime!(columns) {
                    stats = shared_load_four(stats_stage + comptime!(n as u32 * 64));
                }
                #[unroll]
                for m in 0..tiles {
                    let at = comptime!(m * eights + n);
                    let mut four = s[at];
                    #[unroll]
                    for i in 0..4usize {
                        let mut log = row_lse[comptime!(2 * m + i / 2)];
                        if comptime!(columns) {
                            log = stats.extract(comptime!(i % 2 * 2));
                        }
                        four.insert(
                            i,
                            exp2(multiply_add(four.extract(i), numbers.log2_scale, -log)),
                        );
                    }
                    s[at] = four;
                }
            }
            if comptime!(columns && t.outputs.second()) {
                let p = pack_kept(&s, &kept_bits, t);
                accumulate(
                    &p,
                    operands.b2_rows + b2_stage,
                    &mut out2,
                    comptime!(t.value_dim),
                    t,
                );
            }
            if comptime!(t.outputs.first()) {
                let mut dp = product(
                    operands.a2_rows,
                    &none,
                    operands.b2_cols + b2_stage,
                    false,
                    comptime!(t.value_dim),
                    t,
                );
                #[unroll]
                for n in 0..eights {
                    let mut stats = Vector::<f32, Four>::zeroed();
                    if comptime!(columns) {
                        stats = shared_load_four(stats_stage + comptime!(n as u32 * 64));
                    }
                    #[unroll]
                    for m in 0..tiles {
                        let at = comptime!(m * eights + n);
                        let mut four = dp[at];
                        let p = s[at];
                        #[unroll]
                        for i in 0..4usize {
                            let mut delta = row_delta[comptime!(2 * m + i / 2)];
                            if comptime!(columns) {
                                delta = stats.extract(comptime!(i % 2 * 2 + 1));
                            }
                            let mut by_weight = four.extract(i);
                            if comptime!(t.score.dropout) {
                                by_weight =
                                    if_kept(by_weight * dropout.factor, &kept_bits, m, n, i, t);
                            }
                            four.insert(i, p.extract(i) * (by_weight - delta));
                        }
                        if comptime!(t.score.softcap && !t.bias_gradient) {
                            four *= cap_slope[at];
                        }
                        dp[at] = four;
                    }
                }
                if comptime!(!t.bias_gradient) {
                    let ds = pack_left(&dp, t);
                    accumulate(
                        &ds,
                        operands.b1_rows + b1_stage,
                        &mut out1,
                        comptime!(t.head_dim),
                        t,
                    );
                } else if comptime!(columns) {
                    sum_queries(&dp, &mut key_sums, t);
                } else {
                    add_pairs(&s, &dp, &gradient, own, positions + quad * 4, t);
                }
            }
            store_place(base, done + 2, &found, &listing, b1_strides.len, t);
            done += 1;
        }
    }

    let first = (batch * slice.heads as u32 + outer) * a1_strides.len;
    if comptime!(t.bias_gradient) {
        if comptime!(columns) {
            add_sums(&key_sums, &gradient, own, lane, t);
        }
    } else if comptime!(t.outputs.first()) {
        store_rows(
            out,
            &out1,
            0u32,
            first,
            base,
            first_row,
            quad,
            numbers.scale,
            comptime!(t.head_dim),
            t,
        );
    }
    if comptime!(columns && t.outputs.second()) {
        let factor = if comptime!(t.score.dropout) {
            dropout.factor
        } else {
            f32::new(1.0)
        };
        store_rows(
            out,
            &out2,
            lengths.second,
            first,
            base,
            first_row,
            quad,
            factor,
            comptime!(t.value_dim),
            t,
        );
    }
}

/// Stores the unit's rows, whose positions are in shared memory.
#[cube]
pub fn store_rows(
    out: &mut [u32],
    acc: &Array<Vector<f32, Four>>,
    start: u32,
    first: u32,
    positions: u32,
    first_row: u32,
    quad: u32,
    factor: f32,
    #[comptime] dim: usize,
    #[comptime] t: Tile,
) {
    #[unroll]
    for i in 0..comptime!(2 * t.warp_tiles) {
        let row = first_row + comptime!(i as u32 * ROW_PAIR);
        let position = shared_load(positions + row * 4);
        if position != comptime!(NOWHERE) {
            let at = start as usize + (first + position) as usize * comptime!(t.words(dim));
            #[unroll]
            for n in 0..comptime!(dim / 8) {
                let four = acc[comptime!(i / 2 * (dim / 8) + n)];
                let mut pair = NumberPair {
                    low: four.extract(comptime!(i % 2 * 2)) * factor,
                    high: four.extract(comptime!(i % 2 * 2 + 1)) * factor,
                };
                if comptime!(t.carry) {
                    let before = load_pair(&out[..], at, quad, n, t);
                    pair.low += before.low;
                    pair.high += before.high;
                }
                store_pair(out, at, quad, &pair, n, t);
            }
        }
    }
}
