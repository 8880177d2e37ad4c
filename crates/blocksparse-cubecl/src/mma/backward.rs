//! The backward kernel for dQ (a loop over rows) and for dK and dV (a loop over columns). It has one cube per tile and one warp per 16 or 32 of its rows.
//!
//! ```text
//!            a1  a2   b1  b2        s  = a1 · b1ᵀ      p  = exp2(s · log2_scale − lse)
//! rows       q   dO   k   v         dp = a2 · b2ᵀ      ds = p ∘ (dp − delta)
//! columns    k   v    q   dO        out1 += ds · b1    out2 += p · b2   (columns only)
//! ```
//!
//! While step j is computed, the rows of step j + 1 are copied and the positions of step j + 2 are computed. p and ds are left operands in registers. In a
//! loop over columns, s, p, dp and ds are transposed, and lse and delta belong to columns and are copied with the step. `out1 · scale` is dQ or dK, and
//! out2 is dV. Biases are added to s as in the forward pass. With dropout, dp and the p in `p · b2` have the factors of the forward pass. With a threshold,
//! a warp skips the work after p if all its p are below `exp(−threshold)`.

// Compile-time conditions stay separate from run-time ones, and kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::backward_loads::*;
use super::bias_gradient::*;
use super::dropout::*;
use super::gather::*;
use super::product::*;
use super::score::*;
use super::score_gradient::*;
use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::{
    Four, MainloopOperands, Schedule, batch_of, head_of, heads_of_tile,
};
use crate::shared::dropout::DropoutArgs;
use crate::shared::own_rows::own_rows;
use crate::shared::score::ScoreScalars;

/// Lengths of a launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct MainloopLengths {
    /// Places per head in the stats.
    pub pitch: u32,
    /// Query heads per head of keys.
    pub heads_per_kv: u32,
    /// Word of `out` at which dV begins.
    pub second: u32,
    /// Cubes that share the steps of a tile.
    pub chunks: u32,
}

/// `a1`, `a2`, `b1` and `b2` are in words. The strides of their outer dimensions are multiples of 16 bytes. `stats` is `[batch · heads, pitch, 2]`:
/// `lse · log2 e` and delta of the query at each place, followed by the ALiBi slopes. `out` is `[batch, heads, len, dim]` in words, with out2 from word
/// `second` on. With `carry`, the results are added to it.
///
/// With `t.bias_gradient`, `out` is the gradient of the bias, to which `ds` is added without the softcap's factor. A loop over rows adds it pair by pair.
/// If all queries share a row of the bias, a loop over columns adds a sum per key, and is launched for query heads. Batch entries and heads that share a
/// bias are in separate slices, so that every element has one writer at a time.
#[cube(launch_unchecked)]
pub fn backward(
    operands: MainloopOperands<Box<[u32]>>,
    stats: &[f32],
    biases: BiasArgs,
    out: &mut [u32],
    strides: MainloopOperands<Strides>,
    schedule: Schedule,
    lengths: MainloopLengths,
    numbers: ScoreScalars,
    dropout: DropoutArgs<f32>,
    #[comptime] t: Tile,
) {
    let parts = &schedule.parts;
    let plan = &schedule.plan.words[..];
    let listing = &schedule.plan.listing;
    let slice = &schedule.slice;
    let (a_len, b_len) = (strides.a1.len, strides.b1.len);
    let columns = comptime!(t.columns());
    let smem: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(t.shared_bytes(true) / 4), 128usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let outer = head_of(slice) as u32;
    let batch = batch_of(slice) as u32;

    let each = comptime!(columns && t.bias_gradient);
    let (all_heads, heads_per_kv) = (slice.heads as u32, lengths.heads_per_kv);
    let heads = heads_of_tile(outer, all_heads, heads_per_kv, columns, each);
    let heads_at = parts.heads + batch as usize * parts.batch;
    let record0 = plan[heads_at + heads.first as usize] as usize;
    let pieces = comptime!(t.bias_gradient && !columns);
    let mut rank = CUBE_POS_X;
    if comptime!(pieces) {
        rank = CUBE_POS_X / lengths.chunks;
    }
    let ranked = parts.order + (record0 + rank as usize) * 4;
    let tile = plan[ranked];

    let cursor = Cursor {
        head: RuntimeCell::<u32>::new(heads.first),
        end: heads.first + heads.turns,
        entry: RuntimeCell::<usize>::new(0usize),
        j: RuntimeCell::<u32>::new(0u32),
        steps: RuntimeCell::<u32>::new(0u32),
    };
    open(plan, parts, ranked + 1, &cursor);
    // The steps of a bias gradient add to separate elements in memory, so several cubes share those of a tile.
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
        b1: address::<u32>(&operands.b1[..]),
        b2: address::<u32>(&operands.b2[..]),
        stats: address::<f32>(stats),
        base,
        batch,
        heads: heads.all,
        divisor: heads.divisor,
        pitch: lengths.pitch,
    };
    let rows = own_rows(parts, record0, tile, comptime!(t.own_shape()));
    own_positions(base, plan, rows, listing, a_len, t);
    let found = next_place(plan, parts, heads_at, tile, &cursor, t);
    let mut loaded = found.place;
    store_place(base, 0u32, &found, listing, b_len, t);
    let found = next_place(plan, parts, heads_at, tile, &cursor, t);
    store_place(base, 1u32, &found, listing, b_len, t);
    sync_cube();

    clear_rows(base, t);
    copy_own_rows(&operands, &strides, base, batch, heads.own, t);
    copy_step(&loads, &strides.b1, &strides.b2, 0u32, loaded, t);
    loaded = found.place;

    let warp_rows = warp * comptime!(16 * t.warp_tiles as u32);
    let first_row = warp_rows + lane / 4;
    let quad = lane % 4 * 2;
    let places = operand_places(base, warp_rows, lane, t);
    let of_rows = row_stats(stats, plan, &loads, outer, rows, first_row, t);

    let gradient = gradient_rows(&out[..], &biases.strides, batch, outer, t);
    let key_pairs = comptime!(if t.bias_gradient { 2 * t.warp_tiles } else { 0 });
    let mut key_sums = Array::<f32>::new(comptime!(key_pairs.max(1)));
    #[unroll]
    for i in 0..key_pairs {
        key_sums[i] = f32::new(0.0);
    }
    let mut out1 = no_sums(comptime!(if t.outputs.first() && !t.bias_gradient {
        t.warp_tiles * t.head_dim / 8
    } else {
        1
    }));
    let mut out2 = no_sums(comptime!(if columns && t.outputs.second() {
        t.warp_tiles * t.value_dim / 8
    } else {
        1
    }));

    let none = Array::<Vector<u32, Four>>::new(1usize);
    let own = base + first_row * 4;
    let mut done = 0u32;
    for turn in 0..heads.turns {
        let head = heads.first + turn;
        let mut slope = f32::new(0.0);
        if comptime!(t.score.alibi) {
            slope = stats[(slice.batches as u32 * heads.all * lengths.pitch * 2 + head) as usize];
        }
        let of_head = biases_of_head(&biases, slope, b_len - a_len, batch, head, t);
        let record = parts.tiles + (plan[heads_at + head as usize] as usize + tile as usize) * 3;
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
            copy_step(&loads, &strides.b1, &strides.b2, done + 1, loaded, t);
            let found = next_place(plan, parts, heads_at, tile, &cursor, t);
            loaded = found.place;
            let pairs = PairPlaces {
                batch,
                head,
                rows: own,
                cols: positions,
                lane,
            };
            let kept = kept_pairs(&dropout.mask, &pairs, t);

            let b1_stage = stage * comptime!(t.b1_bytes() as u32);
            let b2_stage = stage * comptime!(t.b2_bytes() as u32);
            let stats_stage = places.stats + stage * comptime!(t.stats_bytes() as u32);
            let b1_cols = places.b1_cols + b1_stage;
            let mut s = product(places.a1_rows, &none, b1_cols, false, t.head_dim, t);
            if comptime!(t.score.softcap) {
                cap(&mut s, numbers.softcap, numbers.cap_scale, t);
            }
            let slopes = cap_slopes(&s, numbers.softcap, t);
            let cols = positions + quad * 4;
            if comptime!(t.score.biased()) {
                add_biases(&mut s, &of_head, numbers.cap_scale, own, cols, t);
                add_distances(&mut s, &biases.table, &of_head, own, cols, t);
            }
            if j < masked {
                let entry = entry0 + (j * comptime!(t.entries() as u32 * 2)) as usize;
                mask(&mut s, plan, parts.masks, entry, first_row, quad, t);
            }
            weigh(&mut s, &of_rows, stats_stage, numbers.log2_scale, t);
            if weights_count(&s, &numbers, t) {
                if comptime!(columns && t.outputs.second()) {
                    let p = pack_kept(&s, &kept, t);
                    accumulate(&p, places.b2_rows + b2_stage, &mut out2, t.value_dim, t);
                }
                if comptime!(t.outputs.first()) {
                    let b2_cols = places.b2_cols + b2_stage;
                    let dim = comptime!(t.value_dim);
                    let mut ds = product(places.a2_rows, &none, b2_cols, false, dim, t);
                    gradients_of_scores(
                        &mut ds,
                        &s,
                        &of_rows,
                        stats_stage,
                        &kept,
                        dropout.factor,
                        &slopes,
                        t,
                    );
                    if comptime!(!t.bias_gradient) {
                        let left = pack_left(&ds, t);
                        let b1_rows = places.b1_rows + b1_stage;
                        accumulate(&left, b1_rows, &mut out1, t.head_dim, t);
                    } else if comptime!(columns) {
                        sum_queries(&ds, &mut key_sums, t);
                    } else {
                        add_pairs(&s, &ds, &gradient, own, cols, t);
                    }
                }
            }
            store_place(base, done + 2, &found, listing, b_len, t);
            done += 1;
        }
    }

    if comptime!(t.bias_gradient && columns) {
        add_sums(&key_sums, &gradient, own, lane, t);
    }
    let first = (batch * slice.heads as u32 + outer) * a_len;
    if comptime!(t.outputs.first() && !t.bias_gradient) {
        let (scale, dim) = (numbers.scale, t.head_dim);
        store_rows(
            out, &out1, 0u32, first, base, first_row, quad, scale, dim, t,
        );
    }
    if comptime!(columns && t.outputs.second()) {
        let factor = if comptime!(t.score.dropout) {
            dropout.factor
        } else {
            f32::new(1.0)
        };
        let (start, dim) = (lengths.second, t.value_dim);
        store_rows(
            out, &out2, start, first, base, first_row, quad, factor, dim, t,
        );
    }
}

#[cube]
fn no_sums(#[comptime] fours: usize) -> Array<Vector<f32, Four>> {
    let mut sums = Array::<Vector<f32, Four>>::new(fours);
    #[unroll]
    for i in 0..fours {
        sums[i] = Vector::<f32, Four>::zeroed();
    }
    sums
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
