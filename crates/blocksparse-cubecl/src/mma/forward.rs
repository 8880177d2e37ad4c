//! The forward kernel: one cube per tile of queries, one warp per 16 or 32 of its rows.
//!
//! ```text
//! per step j, with two stages:                   with one stage:
//!     wait for K(j), V(j)                            wait for K(j), start V(j)
//!     start K(j + 1), V(j + 1)   cp.async            s = q · K(j)ᵀ
//!     s = q · K(j)ᵀ              mma.sync            wait for V(j), start K(j + 1)
//!     p = exp2(s − m')           registers           p = exp2(s − m')
//!     o = a · o + p · V(j)       mma.sync            o = a · o + p · V(j)
//! ```
//!
//! With a threshold, a warp skips the rest of a step if all its scores are below `m` by more than that; the values have arrived in shared memory by then.
//! Biases are added to the softcapped or scaled s before the maximum. Dropout removes pairs from p after they are summed.
//!
//! Two cubes share a multiprocessor and fill each other's gaps. The positions of a step's columns are computed once, two steps ahead, and stored in shared
//! memory.

// Compile-time conditions stay separate from run-time ones, and kernels have no `is_multiple_of`.
#![allow(clippy::collapsible_if, clippy::manual_is_multiple_of)]

use cubecl::prelude::*;

use super::dropout::*;
use super::gather::*;
use super::product::*;
use super::score::*;
use super::tile::*;
use crate::arch::sm80::*;
use crate::shared::addressing::{ForwardOutputs, Four, Listing, Qkv, Schedule, batch_of, head_of};
use crate::shared::dropout::DropoutArgs;
use crate::shared::own_rows::own_rows;
use crate::shared::score::{LOWEST_MAX, SLACK, ScoreScalars};

/// `q`, `k` and `v` are in words. The strides of their outer dimensions are multiples of 16 bytes. out is in words too.
///
/// Weights are `p = exp2(s · log2_scale − …)`. With a softcap, first `s = softcap · tanh(x)` with `x = s · cap_scale / 2 log2 e`. Without one, biases are
/// added to `s · cap_scale`. `lse_scale` is `log2 e / log2_scale`, the factor from the natural logarithm to scores. A row's largest score is separate from
/// the softmax's running maximum, which is raised only by large steps.
#[cube(launch_unchecked)]
pub fn forward(
    inputs: Qkv<Box<[u32]>>,
    mut outputs: ForwardOutputs<u32, f32>,
    slopes: ComptimeOption<Box<[f32]>>,
    biases: BiasArgs,
    strides: Qkv<Strides>,
    schedule: Schedule,
    heads_per_kv: u32,
    lse_scale: f32,
    numbers: ScoreScalars,
    dropout: DropoutArgs<f32>,
    #[comptime] t: Tile,
) {
    let parts = &schedule.parts;
    let plan = &schedule.plan.words[..];
    let listing = &schedule.plan.listing;
    let slice = &schedule.slice;
    let log2_scale = numbers.log2_scale;
    let product_scale = numbers.cap_scale;
    let tiles = comptime!(t.warp_tiles);
    let double = comptime!(t.stages == 2);
    let smem: Shared<[u32]> =
        Shared::new_aligned_slice(comptime!(t.shared_bytes(false) / 4), 128usize);
    let base = shared_address(&smem);
    let warp = uniform(UNIT_POS_X / 32);
    let lane = UNIT_POS_X % 32;
    let head = head_of(slice) as u32;
    let batch = batch_of(slice) as u32;

    let first_record = plan[parts.heads + batch as usize * parts.batch + head as usize] as usize;
    let ranked = parts.order + (first_record + CUBE_POS_X as usize) * 4;
    let tile = plan[ranked];
    let record = ranked + 1;
    let entry0 = parts.entries + plan[record] as usize * 2;
    let steps = uniform(plan[record + 1]);
    let masked = uniform(plan[record + 2]);

    let slots = base + comptime!(t.slot_offset() as u32);
    let rows = own_rows(parts, first_record, tile, comptime!(t.own_shape()));
    own_positions(base, plan, rows, listing, strides.q.len, t);
    #[unroll]
    for j in 0..2u32 {
        let place = place_of_column(plan, entry0, j, steps, t);
        store_position(slots, j, place, listing, strides.k.len, t);
    }
    sync_cube();

    let kv_head = head / heads_per_kv;
    let keys = StepRows {
        head: head_address(address::<u32>(&inputs.k[..]), &strides.k, batch, kv_head),
        stride: strides.k.row,
        slots,
        target: base + comptime!(t.b1_offset(false) as u32),
    };
    let values = StepRows {
        head: head_address(address::<u32>(&inputs.v[..]), &strides.v, batch, kv_head),
        stride: strides.v.row,
        slots,
        target: base + comptime!(t.b2_offset(false) as u32),
    };
    let q_at = base + comptime!(t.a1_offset() as u32);
    clear_beyond(q_at, comptime!(t.rows()), t.head_dim, t);
    clear_beyond(keys.target, comptime!(t.stages * t.cols), t.head_dim, t);
    copy_rows(
        head_address(address::<u32>(&inputs.q[..]), &strides.q, batch, head),
        strides.q.row,
        base,
        q_at,
        comptime!(t.rows()),
        t.head_dim,
        t,
    );
    if steps > 0 {
        copy_step(&keys, 0u32, t.head_dim, t);
        if comptime!(double) {
            copy_step(&values, 0u32, t.value_dim, t);
        }
    }

    let warp_rows = warp * comptime!(16 * t.warp_tiles as u32);
    let own = UnitRows {
        base,
        row: warp_rows + lane / 4,
        first: (batch * slice.heads as u32 + head) * strides.q.len,
        lane,
    };
    let quad = lane % 4 * 2;
    let mut m = Array::<f32>::new(comptime!(2 * tiles));
    let mut l = Array::<f32>::new(comptime!(2 * tiles));
    let mut o = Array::<Vector<f32, Four>>::new(comptime!(tiles * t.value_dim / 8));
    let tops = comptime!(if t.max_scores { 2 * tiles } else { 0 });
    let mut top = Array::<f32>::new(comptime!(tops.max(1)));
    #[unroll]
    for i in 0..tops {
        top[i] = f32::new(f32::NEG_INFINITY);
    }
    #[unroll]
    for i in 0..comptime!(2 * tiles) {
        m[i] = f32::new(LOWEST_MAX);
        l[i] = f32::new(0.0);
    }
    #[unroll]
    for i in 0..comptime!(tiles * t.value_dim / 8) {
        o[i] = Vector::<f32, Four>::zeroed();
    }
    if comptime!(t.carry) {
        carry_on(
            &outputs,
            &own,
            lse_scale,
            dropout.factor,
            &mut m,
            &mut l,
            &mut o,
            t,
        );
    }
    wait_copies();
    sync_cube();

    let q_rows =
        q_at + warp_rows * comptime!(t.pitch(t.head_dim) as u32) + lane_rows(lane, t.head_dim, t);
    let k_cols = base + comptime!(t.b1_offset(false) as u32) + lane_cols(lane, t.head_dim, t);
    let v_rows = base + comptime!(t.b2_offset(false) as u32) + lane_depth(lane, t.value_dim, t);
    let kept = comptime!(keeps_queries(t));
    let mut left = Array::<Vector<u32, Four>>::new(comptime!(if kept {
        tiles * t.depth(t.head_dim)
    } else {
        1
    }));
    if comptime!(kept) {
        load_left(q_rows, &mut left, t.head_dim, t);
    }

    let mut slope = f32::new(0.0);
    if comptime!(t.score.alibi) {
        slope = slopes.as_ref().unwrap()[head as usize];
    }
    let shift = strides.k.len - strides.q.len;
    let of_head = biases_of_head(&biases, slope, shift, batch, head, t);
    let own_at = base + own.row * 4;

    for j in 0..steps {
        let stage = comptime!(t.stages as u32 - 1) & j;
        if j > 0 {
            wait_copies();
            sync_cube();
        }
        if comptime!(double) {
            if j + 1 < steps {
                copy_step(&keys, j + 1, t.head_dim, t);
                copy_step(&values, j + 1, t.value_dim, t);
            }
        } else {
            copy_step(&values, j, t.value_dim, t);
        }
        let place = place_of_column(plan, entry0, j + 2, steps, t);
        let positions = slots + slot_of(j, t);
        let pairs = PairPlaces {
            batch,
            head,
            rows: own_at,
            cols: positions,
            lane,
        };
        let kept_bits = kept_pairs(&dropout.mask, &pairs, t);

        let keys_at = k_cols + stage * comptime!(t.b1_bytes() as u32);
        let mut s = product(q_rows, &left, keys_at, kept, t.head_dim, t);
        if comptime!(!double) {
            wait_copies();
            sync_cube();
            if j + 1 < steps {
                copy_step(&keys, j + 1, t.head_dim, t);
            }
        }
        if comptime!(t.score.softcap) {
            cap(&mut s, numbers.softcap, product_scale, t);
        }
        if comptime!(t.score.biased()) {
            let cols = positions + quad * 4;
            add_biases(&mut s, &of_head, product_scale, own_at, cols, t);
            add_distances(&mut s, &biases.table, &of_head, own_at, cols, t);
        }
        if j < masked {
            let entry = entry0 + (j * comptime!(t.entries() as u32 * 2)) as usize;
            mask(&mut s, plan, parts.masks, entry, own.row, quad, t);
        }
        if scores_count(&s, &m, &mut top, &numbers, t) {
            softmax(&mut s, &mut m, &mut l, &mut o, &mut top, log2_scale, t);
            let p = pack_kept(&s, &kept_bits, t);
            let values_at = v_rows + stage * comptime!(t.b2_bytes() as u32);
            accumulate(&p, values_at, &mut o, t.value_dim, t);
        }
        store_position(slots, j + 2, place, listing, strides.k.len, t);
    }

    store_outputs(
        &mut outputs,
        &own,
        &m,
        &l,
        &o,
        &top,
        log2_scale,
        dropout.factor,
        t,
    );
}

/// Rows of a unit: `row`, and every [`ROW_PAIR`]-th after it.
#[derive(CubeType, Clone, Copy)]
struct UnitRows {
    /// Address of the positions of the tile's rows.
    base: u32,
    row: u32,
    /// Row of the head's first position in the outputs.
    first: u32,
    lane: u32,
}

/// Continues from the outputs of earlier parts. They equal a softmax state with maximum lse and sum 1, which one lane of four holds.
#[cube]
fn carry_on(
    outputs: &ForwardOutputs<u32, f32>,
    own: &UnitRows,
    lse_scale: f32,
    dropout_factor: f32,
    m: &mut Array<f32>,
    l: &mut Array<f32>,
    o: &mut Array<Vector<f32, Four>>,
    #[comptime] t: Tile,
) {
    let quad = own.lane % 4 * 2;
    #[unroll]
    for i in 0..comptime!(2 * t.warp_tiles) {
        let row = own.row + comptime!(i as u32 * ROW_PAIR);
        let position = shared_load(own.base + row * 4);
        if position != comptime!(NOWHERE) {
            let at = (own.first + position) as usize;
            let log = outputs.lse[at];
            if log > f32::new(LOWEST_MAX) {
                m[i] = log * lse_scale;
                l[i] = select(own.lane % 4 == 0, f32::new(1.0), f32::new(0.0));
            }
            load_row(&outputs.out[..], o, at, quad, dropout_factor, i, t);
        }
    }
}

/// Writes the unit's rows of the outputs, with largest scores in natural units. With `carry`, the outputs hold the results of earlier parts.
#[cube]
fn store_outputs(
    outputs: &mut ForwardOutputs<u32, f32>,
    own: &UnitRows,
    m: &Array<f32>,
    l: &Array<f32>,
    o: &Array<Vector<f32, Four>>,
    top: &Array<f32>,
    log2_scale: f32,
    dropout_factor: f32,
    #[comptime] t: Tile,
) {
    let quad = own.lane % 4 * 2;
    #[unroll]
    for i in 0..comptime!(2 * t.warp_tiles) {
        let sum = l[i] + shuffle_xor(l[i], 1u32);
        let sum = sum + shuffle_xor(sum, 2u32);
        let mut inverse = f32::new(0.0);
        let mut log = f32::new(f32::NEG_INFINITY);
        if sum > 0.0f32 {
            inverse = reciprocal(sum);
            if comptime!(t.score.dropout) {
                inverse *= dropout_factor;
            }
            log = (m[i] * log2_scale + log2(sum)) * comptime!(std::f32::consts::LN_2);
        }
        let row = own.row + comptime!(i as u32 * ROW_PAIR);
        let position = shared_load(own.base + row * 4);
        if position != comptime!(NOWHERE) {
            let at = (own.first + position) as usize;
            #[unroll]
            for n in 0..comptime!(t.value_dim / 8) {
                let four = o[comptime!(i / 2 * (t.value_dim / 8) + n)];
                let pair = NumberPair {
                    low: four.extract(comptime!(i % 2 * 2)) * inverse,
                    high: four.extract(comptime!(i % 2 * 2 + 1)) * inverse,
                };
                let words = at * comptime!(t.words(t.value_dim));
                store_pair(&mut outputs.out[..], words, quad, &pair, n, t);
            }
            if own.lane % 4 == 0 {
                outputs.lse[at] = log;
                if comptime!(t.max_scores) {
                    let max_scores = outputs.max_scores.as_mut().unwrap();
                    let mut most = top[i] * log2_scale * comptime!(std::f32::consts::LN_2);
                    if comptime!(t.carry) {
                        most = larger(most, max_scores[at]);
                    }
                    max_scores[at] = most;
                }
            }
        }
    }
}

/// Whether the queries stay in registers, which depends on how many are free.
fn keeps_queries(t: Tile) -> bool {
    t.warp_tiles * (t.value_dim / 2 + t.cols / 2 + t.words(t.head_dim) / 2) <= 176
}

/// Sources and targets of copies of keys or values.
#[derive(CubeType, Clone, Copy)]
struct StepRows {
    /// Address of the head.
    head: u64,
    /// Stride of positions in pieces of 16 bytes.
    stride: u64,
    /// Address of the slots of positions.
    slots: u32,
    /// Address of the first stage.
    target: u32,
}

/// Starts to copy the keys or values of step `j`.
#[cube]
fn copy_step(rows: &StepRows, j: u32, #[comptime] dim: usize, #[comptime] t: Tile) {
    let stage = comptime!(t.stages as u32 - 1) & j;
    let positions = rows.slots + slot_of(j, t);
    let target = rows.target + stage * comptime!((t.cols * t.pitch(dim)) as u32);
    copy_rows(rows.head, rows.stride, positions, target, t.cols, dim, t);
}

/// Returns the place of the unit's column of step `j`.
#[cube]
fn place_of_column(plan: &[u32], entry0: usize, j: u32, steps: u32, #[comptime] t: Tile) -> u32 {
    let mut place = 0u32;
    let col = UNIT_POS_X;
    if j < steps && col < comptime!(t.cols as u32) {
        let entry = j * comptime!(t.entries() as u32) + col / comptime!(t.group as u32);
        place = plan[entry0 + (entry * 2) as usize] * comptime!(t.group as u32)
            + col % comptime!(t.group as u32);
    }
    place
}

/// Writes the position of the unit's column of step `j` to its slot.
#[cube]
fn store_position(
    slots: u32,
    j: u32,
    place: u32,
    listing: &Listing,
    len: u32,
    #[comptime] t: Tile,
) {
    if UNIT_POS_X < comptime!(t.cols as u32) {
        let target = slots + slot_of(j, t) + UNIT_POS_X * 4;
        shared_store(target, position_at(place, listing, len, t));
    }
}

/// Returns the largest score of the unit's row `i`, over the columns of all lanes.
#[cube]
fn row_top(s: &Array<Vector<f32, Four>>, #[comptime] i: usize, #[comptime] t: Tile) -> f32 {
    let eights = comptime!(t.eights());
    let first = comptime!(i / 2 * eights);
    let low = comptime!(i % 2 * 2);
    let mut x = s[first].extract(low);
    let mut y = s[first].extract(comptime!(low + 1));
    #[unroll]
    for n in 1..eights {
        let four = s[comptime!(first + n)];
        x = larger(x, four.extract(low));
        y = larger(y, four.extract(comptime!(low + 1)));
    }
    let x = larger(x, y);
    let x = larger(x, shuffle_xor(x, 1u32));
    larger(x, shuffle_xor(x, 2u32))
}

/// Whether any score of the warp's rows is within the threshold of its running maximum.
#[cube]
fn scores_count(
    s: &Array<Vector<f32, Four>>,
    m: &Array<f32>,
    top: &mut Array<f32>,
    numbers: &ScoreScalars,
    #[comptime] t: Tile,
) -> bool {
    if comptime!(t.score.threshold) {
        let threshold = numbers.threshold.unwrap();
        let mut near = false.runtime();
        #[unroll]
        for i in 0..comptime!(2 * t.warp_tiles) {
            let x = row_top(s, i, t);
            if comptime!(t.max_scores) {
                top[i] = larger(top[i], x);
            }
            near = near || (m[i] - x) * numbers.log2_scale <= threshold;
        }
        above_any(select(near, 1u32, 0u32)) != 0
    } else {
        true.runtime()
    }
}

/// Performs a step of online softmax: turns scores into weights, and rescales the state.
#[cube]
pub fn softmax(
    s: &mut Array<Vector<f32, Four>>,
    m: &mut Array<f32>,
    l: &mut Array<f32>,
    o: &mut Array<Vector<f32, Four>>,
    top: &mut Array<f32>,
    log2_scale: f32,
    #[comptime] t: Tile,
) {
    let eights = comptime!(t.eights());
    let mut factors = Array::<f32>::new(comptime!(2 * t.warp_tiles));
    let mut all = f32::new(1.0);
    #[unroll]
    for i in 0..comptime!(2 * t.warp_tiles) {
        let first = comptime!(i / 2 * eights);
        let low = comptime!(i % 2 * 2);
        let x = row_top(&*s, i, t);
        if comptime!(t.max_scores) {
            top[i] = larger(top[i], x);
        }
        let old = m[i];
        let new = select((x - old) * log2_scale > f32::new(SLACK), x, old);
        // The factor is exactly 1 if the maximum stays.
        let factor = exp2((old - new) * log2_scale);
        m[i] = new;
        factors[i] = factor;
        all *= factor;
        let shift = -new * log2_scale;
        let mut sum0 = l[i] * factor;
        let mut sum1 = f32::new(0.0);
        #[unroll]
        for n in 0..eights {
            let mut four = s[comptime!(first + n)];
            let e0 = exp2(multiply_add(four.extract(low), log2_scale, shift));
            let e1 = exp2(multiply_add(
                four.extract(comptime!(low + 1)),
                log2_scale,
                shift,
            ));
            four.insert(low, e0);
            four.insert(comptime!(low + 1), e1);
            s[comptime!(first + n)] = four;
            sum0 += e0;
            sum1 += e1;
        }
        l[i] = sum0 + sum1;
    }
    if any_differ(all, 1.0f32) != 0 {
        #[unroll]
        for i in 0..comptime!(t.warp_tiles) {
            #[unroll]
            for n in 0..comptime!(t.value_dim / 8) {
                let at = comptime!(i * (t.value_dim / 8) + n);
                let mut four = o[at];
                #[unroll]
                for c in 0..4usize {
                    four.insert(c, four.extract(c) * factors[comptime!(2 * i + c / 2)]);
                }
                o[at] = four;
            }
        }
    }
}

/// Reads one of the unit's rows of the output, and divides out the factor of dropout that it already has.
#[cube]
pub fn load_row(
    out: &[u32],
    o: &mut Array<Vector<f32, Four>>,
    at: usize,
    quad: u32,
    dropout_factor: f32,
    #[comptime] i: usize,
    #[comptime] t: Tile,
) {
    #[unroll]
    for n in 0..comptime!(t.value_dim / 8) {
        let mut pair = load_pair(out, at * comptime!(t.words(t.value_dim)), quad, n, t);
        if comptime!(t.score.dropout) {
            pair.low /= dropout_factor;
            pair.high /= dropout_factor;
        }
        let index = comptime!(i / 2 * (t.value_dim / 8) + n);
        let mut four = o[index];
        four.insert(comptime!(i % 2 * 2), pair.low);
        four.insert(comptime!(i % 2 * 2 + 1), pair.high);
        o[index] = four;
    }
}
